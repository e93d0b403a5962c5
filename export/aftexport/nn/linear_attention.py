"""The linear attention layer."""

import torch
from torch import Tensor

from aftexport.nn._projections import MultiHeadLayer


class LinearAttention(MultiHeadLayer):
    """Linear attention with a normalizer (arXiv 2006.16236).

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        feature_map: elu, for elu(x) + 1, or relu.
        eps: the constant that is added to the normalizer.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: str = "elu",
        eps: float = 1e-6,
        causal: bool = False,
    ) -> None:
        super().__init__(dim, num_heads, causal=causal)
        self.feature_map = feature_map
        self.eps = eps

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        ops = torch.ops.aftexport
        op = (
            ops.causal_normalized_linear_attention
            if self.causal
            else ops.normalized_linear_attention
        )
        mixed = op(
            self.query(x),
            self.key(x),
            self.value(x),
            lengths,
            self.num_heads,
            self.feature_map,
            self.eps,
        )
        return self.output(mixed)
