"""Heads that share keys and values, of linear and Efficient Attention, in ONNX textual syntax."""

from collections.abc import Mapping
from typing import Any

from aftexport.operators import onnx_text as text

_WIDTHS = 16, 8
"""The channels of a key and of a value in cases of the parity check."""


def sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the axes of query, key and value; see ``OnnxOperator.sizes``.

    Only with shared keys and values do the widths of key and value differ.
    """
    heads = int(attributes["num_heads"])
    groups = int(attributes["kv_num_heads"]) or heads
    key, value = _WIDTHS if groups < heads else _WIDTHS[:1] * 2
    return {"Q": heads * key, "K": groups * key, "V": groups * value}


def head_shapes() -> str:
    """Define the Reshape targets of query, key and value.

    ``head_shape`` is that of ``num_heads``, ``kv_head_shape`` that of the heads of key and value,
    ``group_shape`` ``[0, 0, kv heads, heads of a group, -1]``.
    """
    return (
        text.head_shape()
        + """
        kv_given = Constant <value_int: int = @kv_num_heads> ()
        kv_given_1d = Unsqueeze(kv_given, zero)
        kv_is_default = Equal(kv_given_1d, zero_1d)
        kv_heads_1d = Where(kv_is_default, num_heads_1d, kv_given_1d)
        group_1d = Div(num_heads_1d, kv_heads_1d)
        kv_head_shape = Concat <axis = 0> (keep_two, kv_heads_1d, infer)
        group_shape = Concat <axis = 0> (keep_two, kv_heads_1d, group_1d, infer)
    """
    )


def kv_heads(name: str, result: str) -> str:
    """Reshape ``[B, S, kv heads * d]`` to ``[B, S, kv heads, d]``; needs ``kv_head_shape``."""
    return f"{result} = Reshape({name}, kv_head_shape)\n"


def repeat_heads(name: str, result: str) -> str:
    """Repeat the heads of ``[B, S, kv heads, d]`` for each head of the query."""
    return f"""
        {result}_axis = Constant <value_ints = [3]> ()
        {result}_column = Unsqueeze({name}, {result}_axis)
        {result}_group = Concat <axis = 0> (one_1d, one_1d, one_1d, group_1d, one_1d)
        {result}_repeated = Expand({result}_column, {result}_group)
        {result} = Reshape({result}_repeated, head_shape)
    """


def attend(queries: str, context: str, result: str) -> str:
    """Multiply each query by the context of its group.

    Args:
        queries: name of ``[B, T, num_heads * d]``.
        context: name of ``[B, kv heads, d, e]``.
        result: name of the products ``[B, T, kv heads, heads of a group, e]``.
    """
    return f"""
        {result}_queries = Reshape({queries}, group_shape)
        {result}_rows = Transpose <perm = [0, 2, 3, 1, 4]> ({result}_queries)
        {result}_context = Unsqueeze({context}, axis2)
        {result}_products = MatMul({result}_rows, {result}_context)
        {result} = Transpose <perm = [0, 3, 1, 2, 4]> ({result}_products)
    """
