"""The base class of the layers with attention heads."""

from collections.abc import Sequence

from torch import nn

from aftexport.nn._projections import check_heads


class MultiHeadLayer(nn.Module):
    """A token-mixing layer with heads and its linear projections of D channels.

    Args:
        dim: channels D.
        num_heads: number of heads H; it must divide ``dim``.
        causal: whether a token sees only itself and earlier tokens.
        projections: names of the projections, in the order of their initialization.

    Raises:
        ValueError: if a count is below 1, or the heads do not divide ``dim``.
    """

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool = False,
        projections: Sequence[str] = ("query", "key", "value", "output"),
    ) -> None:
        super().__init__()
        check_heads(type(self).__name__, dim, num_heads)
        self.num_heads = num_heads
        self.causal = causal
        for name in projections:
            self.add_module(name, nn.Linear(dim, dim))
