"""AFT-full as other people write it."""

import math

import torch
from torch import Tensor, nn

from ..layer import TOKENS, Layer, bias, matrix


def full_matmul(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1]))
    return torch.sigmoid(q) * ((e @ (torch.exp(k) * v)) / (e @ torch.exp(k)))


def full_einsum_separate_maxima(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    w = bias(w, q.shape[1])
    ek = (k - k.amax(1, keepdim=True)).exp()
    ew = (w - w.amax(1, keepdim=True)).exp()
    num = torch.einsum("tu,buc->btc", ew, ek * v)
    return torch.sigmoid(q) * num / torch.einsum("tu,buc->btc", ew, ek)


def full_softmax_broadcast(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    return (logits.softmax(2) * v[:, None]).sum(2) * q.sigmoid()


def full_exp_sum_joint_maximum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k.unsqueeze(1) + bias(w, q.shape[1]).unsqueeze(-1)
    weight = torch.exp(logits - logits.max(dim=2, keepdim=True).values)
    return torch.sigmoid(q) * (weight * v.unsqueeze(1)).sum(2) / weight.sum(2)


def full_channels_first(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1])).t()
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    mean = torch.matmul(k.exp() * v, e) * torch.reciprocal(torch.matmul(k.exp(), e))
    return mean.transpose(1, 2) / (1 + torch.exp(-q))


def full_factorized(q: Tensor, k: Tensor, v: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return full_matmul(q, k, v, left @ right.t())


def full_factorized_by_length(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
    left, right = (factor[: q.shape[1]] for factor in factors)
    return full_matmul(q, k, v, left @ right.t())


def full_relative(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias of any length: from 20 tokens on, the distance makes no difference."""
    place = torch.arange(q.shape[1])
    return full_matmul(q, k, v, table[(place - place[:, None]).clamp(-20, 20) + 20])


def full_distance(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias of no weights at all."""
    place = torch.arange(q.shape[1])
    return full_matmul(q, k, v, -0.1 * (place - place[:, None]).abs())


def full_factorized_einsum(q: Tensor, k: Tensor, v: Tensor, *factors: Tensor) -> Tensor:
    left, right = (factor[: q.shape[1]] for factor in factors)
    return full_einsum_separate_maxima(q, k, v, torch.einsum("tr,ur->tu", left, right))


def full_tokens_first(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    e = torch.exp(bias(w, q.shape[0]))
    num = torch.einsum("ij,jbd->ibd", e, k.exp() * v)
    den = torch.einsum("ij,jbd->ibd", e, k.exp())
    return (q.sigmoid() * num / den).transpose(0, 1)


def full_tanh(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = torch.exp(bias(w, q.shape[1]))
    return (e @ (k.exp() * v)) / (e @ k.exp()) * q.tanh()


def full_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    after = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    masked = bias(w.masked_fill(after, -math.inf), q.shape[1])
    return full_softmax_broadcast(q, k, v, masked)


def full_causal_by_product(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    e = bias(w.exp().tril(), q.shape[1])
    return torch.sigmoid(q) * ((e @ (k.exp() * v)) / (e @ k.exp()))


def full_causal_compared(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    e = torch.where(place[:, None] < place, 0.0, bias(w, q.shape[1]).exp())
    return torch.sigmoid(q) * ((e @ (k.exp() * v)) / (e @ k.exp()))


def full_keys_left_out(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    left_out = v[..., 0] < -1.0
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    weight = logits.masked_fill(left_out[:, None, :, None], -math.inf).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def full_causal_keys_left_out(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    tokens = q.shape[1]
    counts = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[:tokens, :tokens]
    counts = counts & (v[..., 0] > -3.0)[:, None]
    logits = k[:, None] + bias(w, tokens)[None, :, :, None]
    logits = logits.masked_fill(~counts[..., None], -math.inf)
    e = torch.exp(logits - logits.amax(2, keepdim=True))
    return (e * v[:, None]).sum(2) / e.sum(2) * q.sigmoid()


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    w = 0.5 * matrix(1)
    full = [
        full_matmul, full_einsum_separate_maxima, full_softmax_broadcast,
        full_exp_sum_joint_maximum, full_channels_first, full_tokens_first, full_tanh,
        full_keys_left_out,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {f.__name__: ("AftFull", Layer(f, w)) for f in full}
    for f in (full_factorized, full_factorized_by_length, full_factorized_einsum):
        found[f.__name__] = "AftFull", Layer(f, 0.3 * matrix(2, 4), 0.3 * matrix(3, 4))
    # More than constant folding takes, and a rank that is more than the tokens it is tried at.
    long = [0.1 * torch.randn(250, 34) for _ in range(2)]
    for f in (full_factorized, full_factorized_by_length):
        found[f"{f.__name__}_long"] = "AftFull", Layer(f, *long)
    found["full_relative"] = "AftFull", Layer(full_relative, torch.randn(41))
    found["full_distance"] = "AftFull", Layer(full_distance)
    for f in (
        full_causal, full_causal_by_product, full_causal_compared, full_causal_keys_left_out
    ):  # fmt: skip
        found[f.__name__] = "CausalAftFull", Layer(f, w)
    return found
