"""The layer of Gated DeltaNet."""

from torch import Tensor, nn

from aftexport.nn._recurrent_layer import DecayByTimeStep, DeltaRuleLayer


class GatedDeltaNet(DeltaRuleLayer):
    """Gated DeltaNet (arXiv 2412.06464, eq. 10 and section 3)::

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        g_t = -exp(A_log) softplus(x_t W_a + dt_bias),   beta_t = sigmoid(x_t W_b)
        o_t = S_t^T q_t / sqrt(dk),                      y_t = (silu(x_t W_g) * norm(o_t)) W_o

    Queries, keys and values pass a short convolution and ``silu``. Each head's queries and keys
    have the Euclidean norm 1. ``norm`` is the root mean square of each head. Keys and values have
    ``dim`` channels.

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
        super().__init__(dim, num_heads, conv_taps=conv_taps, causal=causal)
        self.time_step = nn.Linear(dim, num_heads, bias=False)
        self.decay = DecayByTimeStep(num_heads)
        self.output_gate = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        _, decay = self.decay(self.time_step(x))
        normed = self.normed_rows(x, lengths, decay)
        return self.output(nn.functional.silu(self.output_gate(x)) * normed)
