"""The Efficient Attention layer."""

import torch
from torch import Tensor

from aftexport.nn._projections import MultiHeadLayer


class EfficientAttention(MultiHeadLayer):
    """Efficient Attention (arXiv 1812.01243), per head. The encoder adds the residual.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        normalization: softmax or scaling.
        scale: the factor of the result; the authors use 1.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        normalization: str = "softmax",
        scale: float = 1.0,
        causal: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, causal=causal)
        self.normalization = normalization
        self.scale = scale

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        ops = torch.ops.aftexport
        op = ops.causal_efficient_attention if self.causal else ops.efficient_attention
        mixed = op(
            self.query(x),
            self.key(x),
            self.value(x),
            lengths,
            self.num_heads,
            self.normalization,
            self.scale,
        )
        return self.output(mixed)
