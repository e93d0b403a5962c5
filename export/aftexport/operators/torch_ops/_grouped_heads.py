"""Calls of mechanisms whose heads may share keys and values."""

from dataclasses import dataclass

from torch import Tensor

from aftexport.operators.numerics import check_heads, check_lengths
from aftexport.operators.torch_ops.torch_op import SequenceCall, Shapes


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedHeadsCall(SequenceCall):
    """A call with H heads of the query ``[B, T, H * d]`` and G heads of key and value."""

    # key is [B, S, G * d], and value [B, S, G * e]; e is d if kv_num_heads is 0.

    key_lengths: Tensor | None = None  # int64 [B], the counted keys; None for lengths, and S is T
    num_heads: int
    kv_num_heads: int  # G; 0 for H

    @property
    def kv_heads(self) -> int:
        """The number of heads of key and value."""
        return self.kv_num_heads or self.num_heads

    @property
    def counted(self) -> Tensor:
        """The number of keys of each document."""
        return self.lengths if self.key_lengths is None else self.key_lengths

    def shapes(self) -> Shapes:
        """Return the shape of the output, which has ``num_heads`` heads of the value's width."""
        width = self.value.shape[2] // self.kv_heads
        return ((*self.query.shape[:2], width * self.num_heads),)

    def check(self) -> None:
        op_type, query, key, value = self.op_type, self.query, self.key, self.value
        if query.dim() != 3:
            raise ValueError(
                f"{op_type}: query must be [batch, tokens, channels], "
                f"got shape {tuple(query.shape)}"
            )
        check_heads(op_type, query, self.num_heads)
        groups = self.kv_heads
        if groups < 1 or self.num_heads % groups:
            raise ValueError(
                f"{op_type}: kv_num_heads must divide num_heads {self.num_heads}, "
                f"got {self.kv_num_heads}"
            )
        batch, tokens, channels = query.shape
        if self.key_lengths is not None:
            check_lengths(op_type, query, self.key_lengths, "key_lengths")
            tokens = key.shape[1] if key.dim() == 3 else tokens
        width = channels // self.num_heads * groups
        if key.shape != (batch, tokens, width):
            raise ValueError(
                f"{op_type}: key must be [{batch}, {tokens}, {width}] for the query's shape "
                f"{tuple(query.shape)}, got shape {tuple(key.shape)}"
            )
        if value.dim() != 3 or value.shape[:2] != key.shape[:2] or value.shape[2] % groups:
            raise ValueError(
                f"{op_type}: value must be [{batch}, {tokens}, a multiple of {groups}], "
                f"got shape {tuple(value.shape)}"
            )
        if not self.kv_num_heads and value.shape[2] != width:
            raise ValueError(
                f"{op_type}: value must have the {width} channels of key, got {value.shape[2]}; "
                f"give kv_num_heads {self.num_heads} for values of another width"
            )
        check_lengths(op_type, query, self.lengths)
