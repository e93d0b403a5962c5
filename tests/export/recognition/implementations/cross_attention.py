"""Attention to other tokens than those of the queries, as other people write it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..layer import DIM, HEADS, elu_features, heads, merged

Cross = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function of query, key, value, and whether each query and each key counts."""


class CrossLayer(nn.Module):
    """Queries of the tokens, and keys and values of the tokens and five more.

    Attributes:
        width: the channels of queries and keys, beside ``DIM`` of the values.
    """

    def __init__(self, attend: Cross, width: int | None = None) -> None:
        super().__init__()
        self.attend = attend
        self.query, self.key, self.value = (
            nn.Linear(DIM, n) for n in (width or DIM, width or DIM, DIM)
        )
        self.output = nn.Linear(DIM, DIM)
        self.memory = nn.Parameter(torch.randn(1, 5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        source = torch.cat((x, self.memory.expand(x.shape[0], -1, -1)), 1)
        counts = (x[..., 0] > -1.5, source[..., 0] > -1.0)
        mixed = self.attend(self.query(x), self.key(source), self.value(source), *counts)
        return x + self.output(mixed)


def matching_einsum(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Values divided by their number, which multiplies the result again."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
    q, k = elu_features(q) * rows[:, :, None, None], elu_features(k) * counts[:, :, None, None]
    v = v * counts[:, :, None, None]
    length = v.size(1)
    context = torch.einsum("nshd,nshv->nhdv", k, v / length)
    z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + 1e-6)
    return (torch.einsum("nlhd,nhdv,nlh->nlhv", q, context, z) * length).flatten(2)


def matching_matmul(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    q, k = elu_features(q), elu_features(k) * counts[:, None, :, None]
    below = q @ k.sum(2, keepdim=True).transpose(2, 3) + 1e-6
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def relu_without_masks(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q.relu(), k.relu(), v))
    below = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True) + 1e-3
    return merged(q @ (k.transpose(2, 3) @ v) / below)


def efficient_einsum(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k, v))
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(-2), v)
    return merged(torch.einsum("bhnd,bhde->bhne", q.softmax(-1), context))


def efficient_matmul(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    q, k, v = map(heads, (q, k.masked_fill(~counts[..., None], -1e9), v))
    return merged(q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v))


def layers() -> dict[str, tuple[str, nn.Module]]:
    """Return the expected operator and a layer by name."""
    linear = [matching_einsum, matching_matmul, relu_without_masks]
    found: dict[str, tuple[str, nn.Module]] = {
        f"cross_{f.__name__}": ("NormalizedLinearAttention", CrossLayer(f)) for f in linear
    }
    for f in (efficient_einsum, efficient_matmul):
        found[f"cross_{f.__name__}"] = "EfficientAttention", CrossLayer(f)
        found[f"cross_narrow_{f.__name__}"] = "EfficientAttention", CrossLayer(f, DIM // 2)
    found["cross_narrow_matching_matmul"] = (
        "NormalizedLinearAttention",
        CrossLayer(matching_matmul, DIM // 2),
    )
    return found
