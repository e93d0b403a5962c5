"""Heads that share keys and values, and the causal product, in ONNX textual syntax.

Linear and Efficient Attention use both.
"""

from collections.abc import Mapping
from typing import Any

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums

_WIDTHS = 16, 8
"""The channels of a key and of a value in cases of the parity check."""


def sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the axes of query, key and value; see ``OnnxOperator.sizes``."""
    # Only with shared keys and values do the widths of key and value differ.
    heads = int(attributes["num_heads"])
    groups = int(attributes["kv_num_heads"]) or heads
    key, value = _WIDTHS if groups < heads else _WIDTHS[:1] * 2
    return {"Q": heads * key, "K": groups * key, "V": groups * value}


def head_shapes() -> str:
    """Define the Reshape targets ``head_shape``, ``kv_head_shape`` and ``group_shape``."""
    # group_shape is [0, 0, kv heads, heads of a group, -1].
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
    """Multiply queries ``[B, T, H * d]`` by contexts ``[B, kv heads, d, e]`` of their groups.

    The products are ``[B, T, kv heads, heads of a group, e]``.
    """
    return f"""
        {result}_queries = Reshape({queries}, group_shape)
        {result}_rows = Transpose <perm = [0, 2, 3, 1, 4]> ({result}_queries)
        {result}_context = Unsqueeze({context}, axis2)
        {result}_products = MatMul({result}_rows, {result}_context)
        {result} = Transpose <perm = [0, 3, 1, 2, 4]> ({result}_products)
    """


def causal_product_body(query: str, key: str, value: str, result: str) -> str:
    """Define ``result[t] = sum_{u<=t} (query[t] . key[u]) value[u]``, ``[B, T, H, *]``."""
    # Within blocks of 64 tokens the pairs are multiplied out; earlier blocks enter through a
    # running sum of key^T value.
    lines = """
        block = Constant <value_ints = [64]> ()
        tokens_up = Add(tokens, block)
        tokens_up_less = Sub(tokens_up, one_1d)
        blocks = Div(tokens_up_less, block)
        padded_tokens = Mul(blocks, block)
        missing = Sub(padded_tokens, tokens)
        block_pads = Concat <axis = 0> (zero_1d, missing)
        batch_size = Constant <value_ints = [0]> ()
        rest = Constant <value_ints = [-1]> ()
        block_shape = Concat <axis = 0> (batch_size, blocks, block, num_heads_1d, rest)
    """
    for name, blocked in ((query, "query_blocks"), (key, "key_blocks"), (value, "value_blocks")):
        lines += f"""
            {blocked}_padded = Pad({name}, block_pads, , axis1)
            {blocked}_split = Reshape({blocked}_padded, block_shape)
            {blocked} = Transpose <perm = [0, 1, 3, 2, 4]> ({blocked}_split)
        """
    return (
        lines
        + """
        key_columns = Transpose <perm = [0, 1, 2, 4, 3]> (key_blocks)
        all_similarity = MatMul(query_blocks, key_columns)
        similarity = Trilu <upper = 0> (all_similarity)
        within = MatMul(similarity, value_blocks)
        block_contexts = MatMul(key_columns, value_blocks)
    """
        + sums.cut_of("block_contexts", "blocks", "context")
        + sums.split("block_contexts", "context_groups", cut="context")
        + sums.running_total("context_groups", "contexts_covered", exclusive=True, cut="context")
        + f"""
        contexts_before = Slice(contexts_covered, zero_1d, blocks, axis1)
        from_before = MatMul(query_blocks, contexts_before)
        block_results = Add(within, from_before)
        blocks_last = Transpose <perm = [0, 1, 3, 2, 4]> (block_results)
        value_width = Shape <start = 3, end = 4> ({value})
        joined_shape = Concat <axis = 0> (batch_size, rest, num_heads_1d, value_width)
        joined = Reshape(blocks_last, joined_shape)
        {result} = Slice(joined, zero_1d, tokens, axis1)
    """
    )
