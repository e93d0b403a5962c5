"""AFT-simple as other people write it."""

import math

import torch
from torch import Tensor, nn

from ..layer import Layer, heads, merged


def simple_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.sigmoid(q) * (torch.softmax(k, 1) * v).sum(dim=1, keepdim=True)


def simple_exp_sum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return torch.sigmoid(q) * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_shifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(k - k.max(dim=1, keepdim=True)[0])
    return (e * v).sum(1)[:, None] * e.sum(1)[:, None].reciprocal() * torch.sigmoid(q)


def simple_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = torch.einsum("btd,btd->bd", k.softmax(1), v)
    return torch.einsum("btd,bd->btd", q.sigmoid(), context)


def simple_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    return merged(q.sigmoid() * (k.softmax(-2) * v).sum(-2, keepdim=True).expand_as(v))


def simple_log_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weight = torch.exp(k - torch.logsumexp(k, 1, keepdim=True))
    return (weight * v).sum(1, keepdim=True) * q.sigmoid()


def simple_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return torch.sigmoid(q) * (e * v).cumsum(1) / e.cumsum(1)


def simple_causal_compared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    counts = place[:, None] - place >= 0
    weight = k[:, None].masked_fill(~counts[..., None], -math.inf).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def simple_keys_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.masked_fill(v[..., :1] < -1.0, -math.inf)
    return q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True)


def simple_mask_added(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (v[..., :1] > -1.0).float()
    return q.sigmoid() * ((k + (1 - mask) * -1e4).softmax(1) * v).sum(1, keepdim=True)


def simple_mask_multiplied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp() * (v[..., :1] > -1.0).float()
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_mask_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp().masked_fill(~(v[..., :1] > -1.0), 0.0)
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / e.sum(1, keepdim=True)


def simple_masks_of_two_kinds(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Whether a token counts is told by two conditions, and left out of keys and of values."""
    counts = ~((v[..., :1] < -1.5) | (v[..., 1:2] < -1.5))
    weight = k.masked_fill(~counts, -math.inf).softmax(1)
    return q.sigmoid() * (weight * (v * counts)).sum(1, keepdim=True)


def simple_weights_filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights are 0, and not NaN, where no token counts."""
    left_out = v[..., :1] < -1.0
    weight = k.masked_fill(left_out, -math.inf).softmax(1).masked_fill(left_out, 0.0)
    return q.sigmoid() * (weight * v).sum(1, keepdim=True)


def simple_keys_of_unit_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The norm has a minimum, and the keys are not clamped."""
    weight = (8 * nn.functional.normalize(k, dim=-1)).softmax(1)
    return q.sigmoid() * (weight * v).sum(1, keepdim=True)


def simple_values_over_largest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Maxima of values and keys over the channels, which are not subtracted."""
    v, k = (x / x.abs().amax(-1, keepdim=True) for x in (v, k))
    return q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True)


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    simple = [
        simple_softmax, simple_exp_sum, simple_shifted, simple_einsum, simple_heads,
        simple_log_softmax, simple_keys_left_out, simple_mask_added, simple_mask_multiplied,
        simple_mask_filled, simple_masks_of_two_kinds, simple_keys_of_unit_norm,
        simple_values_over_largest, simple_weights_filled,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {f.__name__: ("AftSimple", Layer(f)) for f in simple}
    for f in (simple_causal, simple_causal_compared):
        found[f.__name__] = "CausalAftSimple", Layer(f)
    return found
