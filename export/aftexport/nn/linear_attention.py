"""The linear attention layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import check_heads


class LinearAttention(nn.Module):
    """Linear attention with a normalizer (arXiv 2006.16236).

    Args:
        dim: channels D.
        num_heads: H, divides ``dim``.
        feature_map: elu, for elu(x) + 1, or relu.
        eps: added to the normalizer.
        causal: a token sees itself and what came before it.

    Raises:
        ValueError: where a count is below 1, or the heads do not divide ``dim``.
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
        super().__init__()
        check_heads("LinearAttention", dim, num_heads)
        self.num_heads = num_heads
        self.feature_map = feature_map
        self.eps = eps
        self.causal = causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mixes the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
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
