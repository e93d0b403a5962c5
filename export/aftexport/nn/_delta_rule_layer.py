"""Parts that the layers of the delta rule share."""

import torch
from torch import Tensor, nn

from aftexport.nn._recurrent_layer import (
    RecurrentLayer,
    RootMeanSquareNorm,
    ShortConvolution,
    norm_heads,
    unit_heads,
)


class DeltaRuleLayer(RecurrentLayer):
    """A layer whose queries, keys and values pass a short convolution, before a delta rule.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        conv_taps: taps of the short convolution.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(
        self, dim: int, num_heads: int, *, conv_taps: int = 4, causal: bool = False
    ) -> None:
        super().__init__(dim, num_heads, causal=causal)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.convolution = ShortConvolution(3 * dim, conv_taps)
        self.beta = nn.Linear(dim, num_heads, bias=False)
        self.norm = RootMeanSquareNorm(dim // num_heads)

    def normed_rows(self, x: Tensor, lengths: Tensor, decay: Tensor | None = None) -> Tensor:
        """Return the normalized results of the recurrence, ``[B, T, D]``.

        Args:
            x: ``[B, T, D]``.
            lengths: int64 ``[B]``.
            decay: logarithms of the decay, ``[B, T, H]``; None for no decay.
        """
        query, key, value = self.convolution(self.query_key_value(x), lengths).chunk(3, -1)
        mixed = self.recur(
            unit_heads(query, self.num_heads),
            unit_heads(key, self.num_heads),
            value,
            lengths,
            decay=decay,
            beta=torch.sigmoid(self.beta(x)),
        )
        return norm_heads(self.norm, mixed, self.num_heads)
