"""The AFT-conv layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import FACTOR_STD, check_counts, check_heads


class AftConv(nn.Module):
    """AFT-conv (arXiv 2105.14103, eq. 6): one key channel and one filter per head.

    The filter is re-parameterized, ``gamma (w - mean) / std + beta`` per head. Gamma and
    beta start at 0, so the layer starts as AFT-simple.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        window: taps s of each filter.
        gate: sigmoid, tanh or none.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        *,
        gate: str = "sigmoid",
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_heads("AftConv", dim, num_heads)
        check_counts("AftConv", window=window)
        self.num_heads = num_heads
        self.gate = gate
        self.causal = causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, num_heads)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)
        self.weight = nn.Parameter(torch.randn(num_heads, window) * FACTOR_STD)
        self.gamma = nn.Parameter(torch.zeros(num_heads, 1))
        self.beta = nn.Parameter(torch.zeros(num_heads, 1))
        self.register_buffer("folded_filter", None, persistent=False)

    def filter(self) -> Tensor:
        """Return the bias of each head by tap, ``[H, s]``."""
        if self.folded_filter is not None:
            return self.folded_filter
        centered = self.weight - self.weight.mean(1, keepdim=True)
        # A single tap has no spread: the clamp makes the filter beta instead of 0/0. The clamp
        # comes before the root because the gradient of the root at 0 is infinite.
        std = centered.square().mean(1, keepdim=True).clamp(min=1e-12).sqrt()
        return self.gamma * centered / std + self.beta

    def fold(self) -> None:
        """Make the filter a constant of the exported graph."""
        self.folded_filter = self.filter().detach()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        op = torch.ops.aftexport.causal_aft_conv if self.causal else torch.ops.aftexport.aft_conv
        mixed = op(
            self.query(x),
            self.key(x),
            self.value(x),
            self.filter(),
            lengths,
            self.num_heads,
            self.gate,
        )
        return self.output(mixed)
