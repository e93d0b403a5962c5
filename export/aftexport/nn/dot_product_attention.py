"""Ordinary attention, the baseline; its cost is quadratic in the tokens."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import MultiHeadLayer
from aftexport.operators.numerics import valid_keys


class DotProductAttention(MultiHeadLayer):
    """Scaled dot-product attention (arXiv 1706.03762, eq. 1), exported in standard ops.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__(dim, num_heads, causal=causal)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        tokens = x.shape[1]
        query, key, value = (
            projection(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        # The first key is always valid, so that an empty document gives numbers, not NaN.
        mask = valid_keys(lengths.clamp(min=1), tokens)[:, None, None, :]
        if self.causal:
            mask = mask & torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))
