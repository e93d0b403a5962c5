"""The layer of DeltaNet."""

from torch import Tensor, nn

from aftexport.nn._recurrent_layer import DeltaRuleLayer


class DeltaNet(DeltaRuleLayer):
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
        super().__init__(dim, num_heads, conv_taps=conv_taps, causal=causal)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        return self.output(self.normed_rows(x, lengths))
