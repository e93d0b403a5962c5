"""The Efficient Attention layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import check_heads


class EfficientAttention(nn.Module):
    """Efficient Attention (arXiv 1812.01243), per head. The residual is the encoder's.

    Args:
        dim: channels D.
        num_heads: H, divides ``dim``.
        normalization: softmax or scaling.
        scale: factor of the result; the authors use 1.
        causal: a token sees itself and what came before it.

    Raises:
        ValueError: where a count is below 1, or the heads do not divide ``dim``.
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
        super().__init__()
        check_heads("EfficientAttention", dim, num_heads)
        self.num_heads = num_heads
        self.normalization = normalization
        self.scale = scale
        self.causal = causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mixes the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
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
