"""The layer of RetNet."""

import torch
from torch import Tensor, nn

from aftexport.nn._recurrent_layer import RecurrentLayer, fixed_decay
from aftexport.operators.numerics import split_heads

_EPS = 1e-5


class Retention(RecurrentLayer):
    """Multi-scale retention of RetNet (arXiv 2307.08621, eq. 6 and 8)::

        S_t = gamma_h S_{t-1} + k_t v_t^T,   gamma_h = 1 - 2^(-5 - h) for head h = 0, 1, ...
        o_t = S_t^T q_t / sqrt(dk),          y_t = (silu(x_t W_g) * norm(o_t)) W_o

    ``norm`` is the group norm with a group for each head. The rotation of queries and keys by
    their positions (xPos) is left out, so documents of any length run in chunks.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    decay: Tensor

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__(dim, num_heads, causal=causal)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(dim))
        self.norm_bias = nn.Parameter(torch.zeros(dim))
        self.output = nn.Linear(dim, dim, bias=False)
        heads = torch.arange(num_heads, dtype=torch.float64)
        self.register_buffer("decay", torch.log1p(-(2.0 ** (-5 - heads))))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        mixed = self.recur(
            self.query(x), self.key(x), self.value(x), lengths, decay=fixed_decay(self.decay, x)
        )
        heads = split_heads(mixed, self.num_heads)
        normed = nn.functional.layer_norm(heads, heads.shape[-1:], eps=_EPS).flatten(2)
        normed = normed * self.norm_weight + self.norm_bias
        return self.output(nn.functional.silu(self.output_gate(x)) * normed)
