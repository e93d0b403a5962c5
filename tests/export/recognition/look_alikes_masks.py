"""Masks that turn a mechanism into another function: none may be rewritten."""

import torch
from torch import Tensor, nn

from .layer import HEADS, Layer, bias, elu_features, heads, merged


def _scores(q: Tensor, k: Tensor, first: int, *, upper: bool) -> Tensor:
    """Scores of which those above or below a diagonal, from the ``first`` on, are made 0."""
    ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    left_out = torch.triu(ones, first) if upper else torch.tril(ones, first)
    return (elu_features(q) @ elu_features(k).transpose(2, 3)).masked_fill(left_out, 0.0)


def _of_scores(q: Tensor, k: Tensor, v: Tensor, first: int, *, upper: bool) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    scores = _scores(q, k, first, upper=upper)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_of_keys_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, 0, upper=True)


def linear_of_keys_up_to_the_next(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, 2, upper=True)


def linear_of_keys_from_here(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, -1, upper=False)


def linear_of_keys_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _of_scores(q, k, v, 0, upper=False)


def linear_of_positions_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    place = torch.arange(q.shape[1])
    q, k, v = map(heads, (q, k, v))
    scores = (elu_features(q) @ elu_features(k).transpose(2, 3)) * (place[:, None] > place)
    return merged(scores @ v / (scores.sum(-1, keepdim=True) + 1e-6))


def linear_causal_above_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    total = (elu_features(q) @ elu_features(k).transpose(2, 3)).sum(-1, keepdim=True)
    return merged(_scores(q, k, 1, upper=True) @ v / total)


def linear_masked_below_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.masked_fill(left_out, 0.0).sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / den)


def linear_other_mask_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = ((v[..., i : i + 1] < -1.0)[:, None] for i in (0, 1))
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.masked_fill(first, 0.0).sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.masked_fill(second, 0.0).transpose(2, 3) @ v) / den)


def linear_opposite_mask_below(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < 0.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    den = (q * k.masked_fill(left_out, 0.0).sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.masked_fill(~left_out, 0.0).transpose(2, 3) @ v) / den)


def simple_masked_below_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    total = e.masked_fill(v[..., :1] < -1.0, 0.0).sum(1, keepdim=True)
    return q.sigmoid() * (e * v).sum(1, keepdim=True) / total


def efficient_channels_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = torch.arange(q.shape[-1] // HEADS) % 2 == 1
    q, k, v = map(heads, (q, k, v))
    q = q.masked_fill(left_out, -torch.inf)
    return merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def full_keys_much_lower(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    weight = logits.masked_fill((v[..., 0] < -1.0)[:, None, :, None], -1e4).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def full_mask_of_queries_and_keys(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    logits = k[:, None] + bias(w, q.shape[1])[None, :, :, None]
    left_out = (q[..., :1] + v[..., 0][:, None]) < -3.0
    weight = logits.masked_fill(left_out[..., None], -torch.inf).softmax(2)
    return (weight * v[:, None]).sum(2) * q.sigmoid()


def layers(w: Tensor) -> dict[str, nn.Module]:
    """Return the layers by name; ``w`` is a position bias."""
    plain = [
        linear_of_keys_before, linear_of_keys_up_to_the_next, linear_of_keys_from_here,
        linear_of_keys_after, linear_of_positions_before, linear_causal_above_alone,
        linear_masked_below_alone, linear_other_mask_below,
        linear_opposite_mask_below, simple_masked_below_alone, efficient_channels_left_out,
    ]  # fmt: skip
    found: dict[str, nn.Module] = {f.__name__: Layer(f) for f in plain}
    for f in (full_keys_much_lower, full_mask_of_queries_and_keys):
        found[f.__name__] = Layer(f, w)
    return found
