"""The AFT-local layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import FACTOR_STD, banded_product, bias_factor, check_counts


class AftLocal(nn.Module):
    """AFT-local (arXiv 2105.14103, eq. 4): a learned bias within a window, 0 outside it.

    Args:
        dim: channels D.
        window: s; keys with ``|t - u| < s`` have a bias (causal: ``0 <= t - u < s``).
        max_length: Tmax of the paper's factorized bias w = u v^T, one for each pair.
            None selects a bias that depends only on the distance and serves any length.
        bias_rank: number of columns d' of u and v.
        gate: sigmoid, tanh or none.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1.
    """

    def __init__(
        self,
        dim: int,
        window: int,
        max_length: int | None = None,
        *,
        bias_rank: int = 64,
        gate: str = "sigmoid",
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_counts("AftLocal", window=window, max_length=max_length, bias_rank=bias_rank)
        self.max_length = max_length
        self.gate = gate
        self.causal = causal
        self.offsets = range(1 - window, 1 if causal else window)
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        if max_length is None:
            self.relative_bias = nn.Parameter(torch.randn(1, len(self.offsets)) * FACTOR_STD)
        else:
            self.row_factor = bias_factor(max_length, bias_rank)
            self.column_factor = bias_factor(max_length, bias_rank)
        self.register_buffer("folded_band", None, persistent=False)

    def band(self) -> Tensor:
        """Return the bias by row and offset, ``[Tmax or 1, 2s-1]`` (causal ``[Tmax or 1, s]``)."""
        if self.max_length is None:
            return self.relative_bias
        if self.folded_band is not None:
            return self.folded_band
        return banded_product(self.row_factor, self.column_factor, self.offsets)

    def fold(self) -> None:
        """Make the band a constant of the exported graph."""
        self.folded_band = self.band().detach()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``.

        Raises:
            ValueError: if T is more than ``max_length``.
        """
        if self.max_length is not None and x.shape[1] > self.max_length:
            raise ValueError(
                f"AftLocal: {x.shape[1]} tokens, but band was learned for at most {self.max_length}"
            )
        op = torch.ops.aftexport.causal_aft_local if self.causal else torch.ops.aftexport.aft_local
        mixed = op(self.query(x), self.key(x), self.value(x), self.band(), lengths, self.gate)
        return self.output(mixed)
