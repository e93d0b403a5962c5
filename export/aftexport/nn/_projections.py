"""Argument checks, initialization, projections and the base class that the layers share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

FACTOR_STD = 0.01
"""Initial standard deviation of the position-bias factors (AFT paper, section 4)."""


def check_counts(layer: str, **counts: int | None) -> None:
    """Raise ValueError if a count is below 1; None passes."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{layer}: {name} must be at least 1, got {count}")


def check_heads(layer: str, dim: int, num_heads: int) -> None:
    """Raise ValueError if ``num_heads`` is below 1 or does not divide ``dim``."""
    check_counts(layer, dim=dim, num_heads=num_heads)
    if dim % num_heads:
        fitting = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise ValueError(
            f"{layer}: num_heads must divide dim {dim}, got {num_heads}; choose one of {fitting}, "
            "or another dim"
        )


def bias_factor(max_length: int, rank: int) -> nn.Parameter:
    """Return one factor of a position bias, ``[Tmax, rank]``, drawn with ``FACTOR_STD``."""
    return nn.Parameter(torch.randn(max_length, rank) * FACTOR_STD)


def banded_product(row: Tensor, column: Tensor, offsets: range) -> Tensor:
    """Return some diagonals: ``out[t, j] = row[t] . column[t + offsets[j]]``, of ``[T, rank]``."""
    # Entries outside the matrix are 0.
    tokens = row.shape[0]
    left, right = max(-offsets[0], 0), max(offsets[-1], 0)
    padded = nn.functional.pad(column, (0, 0, left, right))
    diagonals = [(row * padded[left + j : left + j + tokens]).sum(1) for j in offsets]
    return torch.stack(diagonals, 1)


class MultiHeadLayer(nn.Module):
    """A token-mixing layer with heads and its linear projections of D channels."""

    # The projections are initialized in the order of their names.

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        projections: Sequence[str] = ("query", "key", "value", "output"),
    ) -> None:
        super().__init__()
        check_heads(type(self).__name__, dim, num_heads)
        self.num_heads = num_heads
        self.causal = causal
        for name in projections:
            self.add_module(name, nn.Linear(dim, dim))
