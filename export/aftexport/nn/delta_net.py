"""The layer of DeltaNet."""

import torch
from torch import Tensor, nn

from aftexport.nn._recurrent import (
    RecurrentLayer,
    RootMeanSquareNorm,
    ShortConvolution,
    split_heads,
    unit_heads,
)


class DeltaNet(RecurrentLayer):
    """DeltaNet (arXiv 2406.06484, section 3)::

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   beta_t = sigmoid(x_t W_b)
        o_t = S_t^T q_t / sqrt(dk),                           y_t = norm(o_t) W_o

    Queries, keys and values pass a short convolution and ``silu``. Each head's queries and keys
    have the Euclidean norm 1. ``norm`` is the root mean square of each head.

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
        super().__init__(dim, num_heads, update_rule="delta", causal=causal)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.convolution = ShortConvolution(3 * dim, conv_taps)
        self.beta = nn.Linear(dim, num_heads, bias=False)
        self.norm = RootMeanSquareNorm(dim // num_heads)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        query, key, value = self.convolution(self.query_key_value(x), lengths).chunk(3, -1)
        mixed = self.recur(
            unit_heads(query, self.num_heads),
            unit_heads(key, self.num_heads),
            value,
            lengths,
            beta=torch.sigmoid(self.beta(x)),
        )
        return self.output(self.norm(split_heads(mixed, self.num_heads)).flatten(2))
