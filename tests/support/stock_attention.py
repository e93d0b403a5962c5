"""Ordinary attention by PyTorch's own function, in standard operators."""

from torch import Tensor, nn

from aftexport.nn import DotProductAttention
from aftexport.operators.numerics import valid_keys


class StockAttention(DotProductAttention):
    """The layer by ``scaled_dot_product_attention``, which compilers and converters fuse."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Mix the tokens of ``x [B, T, D]``; ``lengths`` int64 ``[B]``."""
        query, key, value = (
            projection(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mask = valid_keys(lengths, x.shape[1])[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))


def use_stock_attention(module: nn.Module) -> None:
    """Run every DotProductAttention of a module as a ``StockAttention``."""
    for part in module.modules():
        if isinstance(part, DotProductAttention):
            part.__class__ = StockAttention
