"""Ordinary attention, the baseline; its cost is quadratic in the tokens, unless it has a window."""

import torch
from torch import Tensor

from aftexport.nn._projections import MultiHeadLayer


class DotProductAttention(MultiHeadLayer):
    """Scaled dot-product attention (arXiv 1706.03762, eq. 1).

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens.
        window_left: number of tokens that a token sees before itself; None for all.
        window_right: number of tokens that it sees after itself; None for all. 0 if ``causal``.

    Raises:
        ValueError: if a count is below 1, a window below 0, or the heads do not divide ``dim``.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        window_left: int | None = None,
        window_right: int | None = None,
    ) -> None:
        super().__init__(dim, num_heads, causal=causal)
        for name, window in (("window_left", window_left), ("window_right", window_right)):
            if window is not None and window < 0:
                raise ValueError(f"{type(self).__name__}: {name} must be at least 0, got {window}")
        self.window_left = window_left
        self.window_right = 0 if causal else window_right

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        left, right = (-1 if n is None else n for n in (self.window_left, self.window_right))
        mixed, _ = torch.ops.aftexport.softmax_attention(
            self.query(x), self.key(x), self.value(x), None, None, lengths, self.num_heads, 0.0,
            left, right, 0.0,
        )  # fmt: skip
        return self.output(mixed)
