"""AFT whose keys are fewer than its values: one for all channels, or one for those of a head."""

import math

import torch
from torch import Tensor, nn

from ..layer import HEADS, TOKENS, Layer, bias, heads, matrix, merged
from .aft_full import full_matmul
from .aft_simple import simple_causal, simple_keys_left_out, simple_softmax


def simple_one_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.tanh() * (k.softmax(1).transpose(1, 2) @ v)


def simple_key_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = k.transpose(1, 2).softmax(-1)
    return merged(heads(q.sigmoid()) * (weights.unsqueeze(2) @ heads(v)))


def simple_one_negated_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple_softmax(q, -k, v)


def simple_one_key_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple_keys_left_out(q, k, v)


def simple_one_causal_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return simple_causal(q, k, v)


def full_one_key(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    weights = (k.transpose(1, 2) + bias(w, q.shape[1])).softmax(-1)
    return q.sigmoid() * (weights @ v)


def full_causal_key_of_heads(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    after = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    w = bias(w.masked_fill(after, -math.inf), q.shape[1])
    return q.sigmoid() * merged((k.transpose(1, 2)[:, :, None] + w).softmax(-1) @ heads(v))


def local_one_key(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    place = torch.arange(TOKENS)
    return full_matmul(q, k, v, w * ((place[:, None] - place).abs() < 4))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    w = 0.5 * matrix(1)
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: ("AftSimple", Layer(f, keys=1))
        for f in (simple_one_key, simple_one_negated_key, simple_one_key_left_out)
    }
    found["simple_key_of_heads"] = "AftSimple", Layer(simple_key_of_heads, keys=HEADS)
    found["simple_one_causal_key"] = "CausalAftSimple", Layer(simple_one_causal_key, keys=1)
    found["full_one_key"] = "AftFull", Layer(full_one_key, w, keys=1)
    f = full_causal_key_of_heads
    found[f.__name__] = "CausalAftFull", Layer(f, w, keys=HEADS)
    found["local_one_key"] = "AftLocal", Layer(local_one_key, w, keys=1)
    return found
