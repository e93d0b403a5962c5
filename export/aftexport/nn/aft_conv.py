"""The AFT-conv layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import FACTOR_STD, check_counts, check_heads


class AftConv(nn.Module):
    """AFT-conv (arXiv 2105.14103, eq. 6): one key channel and one filter per head.

    The filter is re-parameterised, ``gamma (w - mean) / std + beta`` per head, with
    gamma and beta 0 at the start: the layer starts as AFT-simple.

    Args:
        dim: channels D.
        num_heads: H, divides ``dim``.
        window: s, taps of each filter.
        gate: sigmoid, tanh or none.
        causal: a token sees itself and what came before it.

    Raises:
        ValueError: where a count is below 1, or the heads do not divide ``dim``.
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
        """The bias of each head by tap, ``[H, s]``."""
        if self.folded_filter is not None:
            return self.folded_filter
        centred = self.weight - self.weight.mean(1, keepdim=True)
        # One tap has no spread: it is beta alone, not 0/0. Clamped before the root, whose
        # gradient at 0 is infinite.
        std = centred.square().mean(1, keepdim=True).clamp(min=1e-12).sqrt()
        return self.gamma * centred / std + self.beta

    def fold(self) -> None:
        """Makes the filter a constant of the exported graph."""
        self.folded_filter = self.filter().detach()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mixes the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
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
