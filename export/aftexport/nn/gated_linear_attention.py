"""The layer of Gated Linear Attention."""

from torch import Tensor, nn

from aftexport.nn._recurrent_layer import RecurrentLayer, RootMeanSquareNorm, norm_heads

_GATE_RANK = 16
_TEMPERATURE = 16.0


class GatedLinearAttention(RecurrentLayer):
    """Gated Linear Attention, GLA (arXiv 2312.06635, eq. 3 and section 4.4)::

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   g_t = log sigmoid(x_t W_1 W_2 + b) / 16
        o_t = S_t^T q_t / sqrt(dk),                 y_t = (silu(x_t W_r + b_r) * norm(o_t)) W_o

    The gate has rank 16 and a decay for each channel of the keys, whose heads have half the width
    of the values, rounded up. ``norm`` is the root mean square of each head, as in the authors'
    code.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens; see ``RecurrentLayer``.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__(dim, num_heads, causal=causal)
        keys = num_heads * -(-dim // num_heads // 2)
        self.query = nn.Linear(dim, keys, bias=False)
        self.key = nn.Linear(dim, keys, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.decay = nn.Sequential(
            nn.Linear(dim, _GATE_RANK, bias=False), nn.Linear(_GATE_RANK, keys)
        )
        self.output_gate = nn.Linear(dim, dim)
        self.norm = RootMeanSquareNorm(dim // num_heads)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        decay = nn.functional.logsigmoid(self.decay(x)) / _TEMPERATURE
        mixed = self.recur(self.query(x), self.key(x), self.value(x), lengths, decay=decay)
        normed = norm_heads(self.norm, mixed, self.num_heads)
        return self.output(nn.functional.silu(self.output_gate(x)) * normed)
