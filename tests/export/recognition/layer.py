"""A layer around a function of query, key and value, and helpers for such functions."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

DIM, HEADS, TOKENS = 16, 4, 36
"""Channels, heads, most tokens."""

Attend = Callable[..., Tensor]


class Layer(nn.Module):
    """Projections around a function of query, key and value, all ``[B, T, D]``."""

    def __init__(self, attend: Attend, *parameters: Tensor, keys: int | None = None) -> None:
        super().__init__()
        self.attend = attend
        # The same weights in each layer: those of another might leave out the only token.
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.query, self.key, self.value = (nn.Linear(DIM, n) for n in (DIM, keys or DIM, DIM))
            self.output = nn.Linear(DIM, DIM)
        self.extra = nn.ParameterList(nn.Parameter(p) for p in parameters)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attend(self.query(x), self.key(x), self.value(x), *self.extra)
        return x + self.output(mixed)


def example(tokens: int = 12, batch: int = 2) -> Tensor:
    """Return an input of a layer, which is the same for one number of tokens."""
    return torch.randn(batch, tokens, DIM, generator=torch.Generator().manual_seed(tokens))


def heads(x: Tensor) -> Tensor:
    """``[B, T, D]`` to ``[B, H, T, d]``."""
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def bias(w: Tensor, tokens: int) -> Tensor:
    return w[:tokens, :tokens]


def elu_features(x: Tensor) -> Tensor:
    return nn.functional.elu(x) + 1


def matrix(seed: int, columns: int | None = None) -> Tensor:
    """Draw a normal matrix ``[TOKENS, columns]``, by default a square one."""
    return torch.randn(TOKENS, columns or TOKENS, generator=torch.Generator().manual_seed(seed))
