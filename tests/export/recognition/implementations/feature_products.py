"""Linear attention with features other than elu(x) + 1 and relu(x), as other people write it.

Each form is written twice: with einsum, and with reshapes and matrix products.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..layer import DIM, HEADS, TOKENS, Attend, Layer, elu_features, heads, merged

WIDTH = DIM // HEADS
RANDOM_FEATURES = 6


def _projection() -> Tensor:
    """Orthogonal directions with the lengths of normal vectors, ``[M, d]``."""
    generator = torch.Generator().manual_seed(7)
    blocks = [
        torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
        for _ in range(-(-RANDOM_FEATURES // WIDTH))
    ]
    lengths = torch.randn(RANDOM_FEATURES, WIDTH, generator=generator).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:RANDOM_FEATURES] * lengths


def split(x: Tensor) -> Tensor:
    """``[B, T, D]`` to ``[B, T, H, d]``."""
    return x.unflatten(-1, (HEADS, -1))


def performer_softmax_einsum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """FAVOR+: positive random features of the softmax kernel, each with its own maximum."""

    def features(x: Tensor, over: tuple[int, ...]) -> Tensor:
        x = x * WIDTH**-0.25
        projected = torch.einsum("bhtd,md->bhtm", x, w)
        half = x.square().sum(-1, keepdim=True) / 2
        shifted = projected - half - projected.amax(over, keepdim=True)
        return RANDOM_FEATURES**-0.5 * (shifted.exp() + 1e-4)

    q, k, v = map(heads, (q, k, v))
    q, k = features(q, (-1,)), features(k, (-1, -2))
    below = 1.0 / torch.einsum("bhtm,bhm->bht", q, k.sum(-2))
    context = torch.einsum("bhtm,bhte->bhme", k, v)
    return merged(torch.einsum("bhme,bhtm,bht->bhte", context, q, below))


def performer_softmax_matmul(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """FAVOR+ without maxima; heads and batch are one axis."""
    batch, tokens = q.shape[:2]

    def features(x: Tensor) -> Tensor:
        x = heads(x).reshape(batch * HEADS, tokens, WIDTH) / math.sqrt(math.sqrt(WIDTH))
        half = 0.5 * (x * x).sum(2, keepdim=True)
        return torch.exp(x @ w.t() - half) / math.sqrt(RANDOM_FEATURES)

    q, k = features(q), features(k)
    v = heads(v).reshape(batch * HEADS, tokens, WIDTH)
    below = torch.bmm(q, k.sum(1).unsqueeze(2)) + 1e-8
    out = torch.bmm(q, torch.bmm(k.transpose(1, 2), v)) / below
    return merged(out.view(batch, HEADS, tokens, WIDTH))


def performer_relu_einsum(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    def features(x: Tensor) -> Tensor:
        return torch.einsum("bthd,md->bthm", split(x) * WIDTH**-0.25, w).relu() + 1e-3

    q, k, v = features(q), features(k), split(v)
    context = torch.einsum("bthm,bthe->bhme", k, v)
    below = torch.einsum("bthm,bhm->bth", q, k.sum(1))
    return (torch.einsum("bthm,bhme->bthe", q, context) / below[..., None]).flatten(2)


def performer_relu_matmul(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = ((x @ w.t()).relu() + 1e-3 for x in (q, k))
    below = q @ k.sum(-2, keepdim=True).transpose(-1, -2)
    return merged(q @ (k.transpose(-1, -2) @ v) / below)


def performer_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = ((x @ w.t()).relu() + 1e-3 for x in (q, k))
    below = torch.einsum("bhtm,bhtm->bht", q, k.cumsum(-2))
    context = torch.einsum("bhtm,bhte->bhtme", k, v).cumsum(2)
    return merged(torch.einsum("bhtm,bhtme->bhte", q, context) / below[..., None])


def angles(tokens: int) -> Tensor:
    return math.pi / 2 * torch.arange(1, TOKENS + 1, dtype=torch.float32)[:tokens] / TOKENS


def cosformer_concatenated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Relu features times sine and cosine of the position, side by side; a clamped normalizer."""
    angle = angles(q.shape[1])[:, None]
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    q, k = (torch.cat((x * angle.sin(), x * angle.cos()), -1) for x in (q, k))
    context = torch.einsum("bhtd,bhte->bhde", k, v)
    below = torch.einsum("bhtd,bhd->bht", q, k.sum(2)).clamp_min(1e-6)
    return merged(torch.einsum("bhtd,bhde,bht->bhte", q, context, 1 / below))


def cosformer_two_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The sum of a product of cosines and one of sines, each with its part of the normalizer."""
    angle = angles(q.shape[1])[:, None]
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    q_cos, q_sin, k_cos, k_sin = q * angle.cos(), q * angle.sin(), k * angle.cos(), k * angle.sin()
    above = q_cos @ (k_cos.transpose(2, 3) @ v) + q_sin @ (k_sin.transpose(2, 3) @ v)
    below = (q_cos * k_cos.sum(2, keepdim=True)).sum(-1, keepdim=True)
    below = below + (q_sin * k_sin.sum(2, keepdim=True)).sum(-1, keepdim=True)
    return merged(above / (below + 1e-6))


def _focused(x: Tensor, scale: Tensor) -> Tensor:
    """A power of each feature that keeps the norm of all."""
    x = (x.relu() + 1e-6) / softplus(scale)
    norm, x = x.norm(dim=-1, keepdim=True), x**3
    return x / x.norm(dim=-1, keepdim=True) * norm


def focused_einsum(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    q, k, v = map(heads, (_focused(q, scale), _focused(k, scale), v))
    below = 1 / (torch.einsum("bhtd,bhd->bht", q, k.sum(2)) + 1e-6)
    context = torch.einsum("bhtd,bhte->bhde", k, v)
    return merged(torch.einsum("bhtd,bhde,bht->bhte", q, context, below))


def focused_matmul(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """Keys and values are divided by the root of the number of tokens, to keep sums small."""
    q, k, v = map(heads, (_focused(q, scale), _focused(k, scale), v))
    tokens = k.shape[2]
    below = 1 / (q @ k.mean(-2, keepdim=True).transpose(-2, -1) + 1e-6)
    context = (k.transpose(-2, -1) * tokens**-0.5) @ (v * tokens**-0.5)
    return merged(q @ context * below)


def _map_layers() -> dict[str, tuple[str, nn.Module]]:
    operator = "NormalizedLinearAttention"
    projected = [
        performer_softmax_einsum, performer_softmax_matmul, performer_relu_einsum,
        performer_relu_matmul,
    ]  # fmt: skip
    found: dict[str, tuple[str, nn.Module]] = {
        f.__name__: (operator, Layer(f, _projection())) for f in projected
    }
    found["performer_causal"] = f"Causal{operator}", Layer(performer_causal, _projection())
    scale = torch.linspace(-1.0, 1.0, DIM)
    found |= {f.__name__: (operator, Layer(f, scale)) for f in (focused_einsum, focused_matmul)}
    for f in (cosformer_concatenated, cosformer_two_products):
        found[f.__name__] = operator, Layer(f)
    return found


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
    found = {f.__name__: ("NormalizedLinearAttention", Layer(f)) for f in plain}
    return _map_layers() | found


def products() -> list[Attend]:
    """Return the functions of which only the product of features and values is the operator's."""
    return [
        linear_unnormalized_einsum, linear_unnormalized_matmul, sum_of_products,
        rotary_above_einsum, rotary_above_matmul,
    ]  # fmt: skip
