"""The layer of Lightning Attention."""

import torch
from torch import Tensor, nn

from aftexport.nn._recurrent_layer import RecurrentLayer, RootMeanSquareNorm, fixed_decay


class LightningAttention(RecurrentLayer):
    """Lightning Attention of TransNormerLLM and MiniMax-01 (arXiv 2401.04658, 2501.08313)::

        S_t = exp(-s_h) S_{t-1} + k_t v_t^T,   s_h = slope_scale * 2^(-8 h / H) for head h = 1..H
        o_t = S_t^T q_t,                       y_t = (sigmoid(x_t W_g) * norm(o_t)) W_o

    Queries, keys and values are ``silu`` of their projections, and ``norm`` is the root mean square
    of all channels.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        slope_scale: the factor of the slopes of a layer. In a model it is
            ``1 - l / (L - 1) + 1e-5`` for layer l = 0..L-1.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    decay: Tensor

    def __init__(
        self, dim: int, num_heads: int, *, slope_scale: float = 1.0, causal: bool = False
    ) -> None:
        super().__init__(dim, num_heads, causal=causal, scale=1.0)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.norm = RootMeanSquareNorm(dim)
        self.output = nn.Linear(dim, dim, bias=False)
        heads = torch.arange(1, num_heads + 1, dtype=torch.float64)
        slopes = slope_scale * 2.0 ** (-8 * heads / num_heads)
        self.register_buffer("decay", -slopes)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        query, key, value = nn.functional.silu(self.query_key_value(x)).chunk(3, -1)
        mixed = self.recur(query, key, value, lengths, decay=fixed_decay(self.decay, x))
        return self.output(torch.sigmoid(self.output_gate(x)) * self.norm(mixed))
