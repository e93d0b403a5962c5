"""Linear attention with features other than elu(x) + 1 and relu(x), as other people write it.

Each form is written twice: with einsum, and with reshapes and matrix products.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ..layer import DIM, HEADS, TOKENS, Layer, heads, merged

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


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
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
