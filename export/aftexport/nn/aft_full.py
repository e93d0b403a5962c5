"""The AFT-full layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import bias_factor, check_counts


class AftFull(nn.Module):
    """AFT-full with a factorized position bias w = u v^T (arXiv 2105.14103, eq. 2 and section 4).

    Args:
        dim: channels D.
        max_length: Tmax; longer sequences raise ValueError.
        bias_rank: number of columns d' of u and v.
        gate: sigmoid, tanh or none.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1.
    """

    def __init__(
        self,
        dim: int,
        max_length: int,
        *,
        bias_rank: int = 64,
        gate: str = "sigmoid",
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_counts("AftFull", max_length=max_length, bias_rank=bias_rank)
        self.max_length = max_length
        self.gate = gate
        self.causal = causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.row_factor = bias_factor(max_length, bias_rank)
        self.column_factor = bias_factor(max_length, bias_rank)
        self.register_buffer("folded_bias", None, persistent=False)

    def position_bias(self) -> Tensor:
        """Return the bias of every (query, key) pair, ``[Tmax, Tmax]``."""
        if self.folded_bias is not None:
            return self.folded_bias
        return self.row_factor @ self.column_factor.T

    def fold(self) -> None:
        """Make the bias a constant of the exported graph."""
        self.folded_bias = self.position_bias().detach()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        op = torch.ops.aftexport.causal_aft_full if self.causal else torch.ops.aftexport.aft_full
        mixed = op(
            self.query(x), self.key(x), self.value(x), self.position_bias(), lengths, self.gate
        )
        return self.output(mixed)
