"""The AFT-simple layer."""

import torch
from torch import Tensor, nn


class AftSimple(nn.Module):
    """AFT-simple (arXiv 2105.14103, eq. 5): no position bias, any length.

    Args:
        dim: channels D.
        gate: sigmoid, tanh or none.
        causal: whether a token sees only itself and earlier tokens.
    """

    def __init__(self, dim: int, *, gate: str = "sigmoid", causal: bool = False) -> None:
        super().__init__()
        self.gate = gate
        self.causal = causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        ops = torch.ops.aftexport
        op = ops.causal_aft_simple if self.causal else ops.aft_simple
        mixed = op(self.query(x), self.key(x), self.value(x), lengths, self.gate)
        return self.output(mixed)
