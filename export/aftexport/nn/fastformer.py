"""The Fastformer layer."""

import torch
from torch import Tensor, nn

from aftexport.nn._projections import check_heads


class Fastformer(nn.Module):
    """Fastformer's attention (arXiv 2108.09084 and the authors' code).

    The value is the query, and the query is added to the transformed result. The
    authors' biases of the two logits are left out: a softmax does not see them.

    Args:
        dim: channels D.
        num_heads: H, divides ``dim``.
        causal: a token sees itself and what came before it.

    Raises:
        ValueError: where a count is below 1, or the heads do not divide ``dim``.
    """

    def __init__(self, dim: int, num_heads: int, *, causal: bool = False) -> None:
        super().__init__()
        check_heads("Fastformer", dim, num_heads)
        self.num_heads = num_heads
        self.causal = causal
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.alpha_weight = nn.Parameter(torch.randn(dim, num_heads) * dim**-0.5)
        self.beta_weight = nn.Parameter(torch.randn(dim, num_heads) * dim**-0.5)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mixes the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
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
