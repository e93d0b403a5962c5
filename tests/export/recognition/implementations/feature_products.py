"""Linear attention with other normalizers and features, as other people write it.

The normalizer has a minimum, or there is none, or it is of other features than the numerator. Keys
and values are shared by heads of queries.
"""

import torch
from torch import Tensor, nn

from ..layer import HEADS, Attend, Layer, elu_features, heads, merged
from .feature_maps import WIDTH, angles, split

_LEAST = torch.tensor(1e-6)
_TURNS = torch.linspace(4.0, 1.0, WIDTH // 2)


def linear_clamped_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = split(q.relu()), split(k.relu()), split(v)
    below = torch.einsum("bthd,bhd->bth", q, k.sum(1)).clamp(min=1e-4)
    context = torch.einsum("bthd,bthe->bhde", k, v)
    return (torch.einsum("bthd,bhde->bthe", q, context) / below[..., None]).flatten(2)


def linear_clamped_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k)
    below = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / torch.maximum(below, _LEAST))


def linear_unnormalized_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Divided by the number of tokens only."""
    tokens = q.shape[1]
    q, k, v = split(elu_features(q)), split(elu_features(k)), split(v)
    context = torch.einsum("bthd,bthe->bhde", k, v) / tokens
    return torch.einsum("bthd,bhde->bthe", q, context).flatten(2)


def linear_unnormalized_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    return merged(q @ (k.transpose(2, 3) @ v)) / q.shape[2]


def linear_shared_keys_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of queries read each head of keys and values."""
    q, k, v = (x.unflatten(-1, (-1, WIDTH)) for x in (elu_features(q), elu_features(k), v))
    k, v = k[:, :, ::2], v[:, :, ::2]
    q = q.unflatten(2, (HEADS // 2, 2))
    context = torch.einsum("btgd,btge->bgde", k, v)
    below = torch.einsum("btgnd,bgd->btgn", q, k.sum(1)) + 1e-6
    return (torch.einsum("btgnd,bgde->btgne", q, context) / below[..., None]).flatten(2)


def linear_shared_keys_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q), heads(k)[:, ::2], heads(v)[:, ::2]
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    q, k = q.relu(), k.relu()
    below = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-5
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def linear_one_head_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = heads(q), heads(k)[:, :1], heads(v)[:, :1]
    q, k = elu_features(q), elu_features(k)
    return merged(q @ (k.transpose(2, 3) @ v) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True))


def linear_shared_keys_tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The heads of queries take turns: every second one reads the same keys and values."""
    q, k, v = heads(q), heads(k)[:, :2], heads(v)[:, :2]
    k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    q, k = elu_features(q), elu_features(k)
    below = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def linear_unequal_features(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), k.relu()
    return merged(q @ (k.transpose(2, 3) @ v) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True))


def linear_squared_relu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu() ** 2, k.relu() ** 2, v))
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-3
    return merged(q @ (k.transpose(2, 3) @ v) / den)


def linear_weighed_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Features of keys times a number of each key."""
    by = v[..., :1].abs()[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k) * by
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v) / den)


def linear_rows_halved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries times a number of each row, in numerator and denominator."""
    by = torch.where(q[..., :1] > -1.0, 1.0, 0.5)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q) * by, elu_features(k)
    den = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ (k.transpose(2, 3) @ v) / (den + 1e-6))


def linear_values_left_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of the numerator alone, as if the values of some keys were 0."""
    counts = (v[..., :1] > -1.0).float()[:, None]
    q, k, v = map(heads, (q.relu() + 1e-3, k.relu() + 1e-3, v))
    below = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(q @ ((k * counts).transpose(2, 3) @ v) / below)


def linear_masked_but_not_by_0(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    left_out = (v[..., :1] < -1.0)[:, None]
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k).masked_fill(left_out, 0.1)
    return merged(q @ (k.transpose(2, 3) @ v) / (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True))


def linear_of_means_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An eps that is added to a mean is as many times as large beside the sum."""
    tokens = q.shape[1]
    q, k, v = split(elu_features(q)), split(elu_features(k)), split(v)
    context = torch.einsum("bthd,bthe->bhde", k, v) / tokens
    below = torch.einsum("bthd,bhd->bth", q, k.mean(1)) + 1e-2
    return (torch.einsum("bthd,bhde->bthe", q, context) / below[..., None]).flatten(2)


def linear_of_means_outer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(heads, (nn.functional.softplus(q), nn.functional.softplus(k), v))
    context = (k[..., None] * v[..., None, :]).mean(2)
    below = (q * k.mean(2, keepdim=True)).sum(-1, keepdim=True).clamp(min=1e-2)
    return merged(q @ context / below)


def sum_of_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of one head, without features."""
    return q @ (k.transpose(1, 2) @ v) / q.shape[1]


def _rotated(x: Tensor) -> Tensor:
    """Pairs of channels turned by an angle of the position."""
    angle = angles(x.shape[2])[:, None] * _TURNS
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    pairs = (first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos())
    return torch.stack(pairs, -1).flatten(-2)


def rotary_above_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The numerator of rotated features; the normalizer of features that are not."""
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    below = torch.einsum("bhtd,bhd->bht", q, k.sum(2)) + 1e-4
    context = torch.einsum("bhtd,bhte->bhde", _rotated(k), v)
    return merged(torch.einsum("bhtd,bhde->bhte", _rotated(q), context) / below[..., None])


def rotary_above_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The tokens last."""
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    below = 1 / (k.sum(2, keepdim=True) @ q.transpose(2, 3) + 1e-4)
    context = v.transpose(2, 3) @ _rotated(k)
    return merged((context @ _rotated(q).transpose(2, 3) * below).transpose(2, 3))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    plain = [
        linear_clamped_einsum, linear_clamped_matmul, linear_shared_keys_einsum,
        linear_shared_keys_matmul, linear_shared_keys_tiled, linear_one_head_of_keys,
        linear_unequal_features, linear_squared_relu, linear_weighed_keys, linear_rows_halved,
        linear_values_left_out, linear_masked_but_not_by_0, linear_of_means_einsum,
        linear_of_means_outer,
        *products(),
    ]  # fmt: skip
    return {f.__name__: ("NormalizedLinearAttention", Layer(f)) for f in plain}


def products() -> list[Attend]:
    """Return the functions of which only the product of features and values is the operator's."""
    return [
        linear_unnormalized_einsum, linear_unnormalized_matmul, sum_of_products,
        rotary_above_einsum, rotary_above_matmul,
    ]  # fmt: skip
