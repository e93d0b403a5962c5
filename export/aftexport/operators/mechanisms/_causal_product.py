"""The causal product of linear and Efficient Attention, in ONNX textual syntax."""

from aftexport.operators import two_level_sums as sums


def causal_product_body(query: str, key: str, value: str, result: str) -> str:
    """Define ``result[t] = sum_{u<=t} (query[t] . key[u]) value[u]``, per head, linear in T.

    The names belong to ``[B, T, H, *]`` tensors. Within blocks of 64 tokens the pairs are
    multiplied out; earlier blocks enter through a running sum of key^T value.
    """
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
        + sums.sum_cut("block_contexts", "blocks", "context")
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
