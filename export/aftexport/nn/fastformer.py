"""The Fastformer layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import MultiHeadLayer


class Fastformer(MultiHeadLayer):
    """Fastformer's attention (arXiv 2108.09084 and the authors' code).

    The query also serves as the value, and is added to the transformed result. The
    authors' biases of the two logits are left out, because they cancel in a softmax.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__(dim, num_heads, causal=causal, projections=("query", "key"))
        self.alpha_weight = nn.Parameter(torch.randn(dim, num_heads) * dim**-0.5)
        self.beta_weight = nn.Parameter(torch.randn(dim, num_heads) * dim**-0.5)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        ops = torch.ops.aftexport
        op = ops.causal_fastformer if self.causal else ops.fastformer
        query = self.query(x)
        mixed = op(
            query,
            self.key(x),
            query,
            self.alpha_weight,
            self.beta_weight,
            lengths,
            self.num_heads,
        )
        return self.output(mixed) + query
