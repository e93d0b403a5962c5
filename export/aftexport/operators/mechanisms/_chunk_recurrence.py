"""A loop over chunks of tokens of recurrent linear attention, in ONNX textual syntax.

``torch_ops._recurrence`` has the formulas. The triangular system of the delta rule is
inverted by blocks: with X the inverse of the blocks of s tokens on the diagonal and B the part of A
between two neighbours, that of blocks of 2 s tokens is X - X B X. A Neumann series would cancel.
"""

from aftexport.operators import onnx_text as text

_CHUNK = 64
_DELTA_CHUNK = 32
_CHANNEL_CHUNK = 16
"""Numbers of tokens in a chunk. An inverse costs more in longer chunks; with a decay for each
channel each pair has as many factors as channels."""


def chunk_loop(ordered: dict[str, str], *, by_channel: bool, reads_reverse_before: bool) -> str:
    """Define ``read_ordered [B, T, S, G, E]`` and ``state_last [B, S, 1, dk, E]``.

    Reads ``past`` and ``nothing``, the initial state and its missing part.

    Args:
        ordered: the tensors ``[B, T, S, G or 1, *]`` of q, k, v, and of g and b if there are any.
        by_channel: whether the decays ``g`` differ between channels of the key.
        reads_reverse_before: whether the second half of the states is read before each write.
    """
    is_delta = "b" in ordered
    size = _CHANNEL_CHUNK if by_channel else _DELTA_CHUNK if is_delta else _CHUNK
    lines = _chunks(ordered, size, is_fixed=is_delta)
    lines += _masks(size if is_delta else 0, reads_reverse_before=reads_reverse_before)
    step = "".join(f"{name} = Gather <axis = 0> ({name}_chunks, chunk)\n" for name in ordered)
    lines += text.loop(
        step + _step("g" in ordered, size if is_delta else 0, by_channel),
        count="chunk_count_0d",
        index="chunk",
        states={"lost": "nothing", "state": "past"},
        ranks={"lost": 5, "state": 5, "read_chunk": 5},
        output="read_chunk",
    )
    return (
        lines
        + """
        group_size = Shape <start = 3, end = 4> (q_chunks)
        stack_shape = Concat <axis = 0> (
            chunk_count, batch, state_count, group_size, chunk_size, value_width
        )
        stack = Reshape(read_chunk_stack, stack_shape)
        stack_by_token = Transpose <perm = [1, 0, 4, 2, 3, 5]> (stack)
        padded_read_shape = Concat <axis = 0> (
            batch, padded_tokens, state_count, group_size, value_width
        )
        padded_read = Reshape(stack_by_token, padded_read_shape)
        read_ordered = Slice(padded_read, zero_1d, tokens, axis1)
    """
    )


def _chunks(ordered: dict[str, str], size: int, *, is_fixed: bool) -> str:
    """Define ``<name>_chunks [N, B, S, G or 1, C, *]``; added tokens change no state."""
    lines = f"""
        largest_chunk = Constant <value_ints = [{size}]> ()
        chunk_size = {"Identity(largest_chunk)" if is_fixed else "Min(largest_chunk, tokens)"}
        tokens_up = Add(tokens, chunk_size)
        tokens_up_less = Sub(tokens_up, one_1d)
        chunk_count = Div(tokens_up_less, chunk_size)
        chunk_count_0d = Squeeze(chunk_count)
        padded_tokens = Mul(chunk_count, chunk_size)
        missing_tokens = Sub(padded_tokens, tokens)
        chunk_pads = Concat <axis = 0> (zero_1d, missing_tokens)
    """
    for name, tensor in ordered.items():
        lines += f"""
            {name}_padded = Pad({tensor}, chunk_pads, , axis1)
            {name}_heads = Shape <start = 2, end = 5> ({tensor})
            {name}_split_shape = Concat <axis = 0> (batch, chunk_count, chunk_size, {name}_heads)
            {name}_split = Reshape({name}_padded, {name}_split_shape)
            {name}_chunks = Transpose <perm = [1, 0, 3, 4, 2, 5]> ({name}_split)
        """
    return lines


def _masks(inverted: int, *, reads_reverse_before: bool) -> str:
    """Define ``later [C, C]``, u < t; ``seen``, the pairs that are read; the blocks of inverses."""
    lines = """
        chunk_size_0d = Squeeze(chunk_size)
        places = Range(zero, chunk_size_0d, one)
        rows = Unsqueeze(places, axis1)
        later = Less(places, rows)
        token_axis = Constant <value_int = 3> ()
        last_chunk_place = Sub(chunk_size, one_1d)
    """
    if reads_reverse_before:
        lines += """
            up_to = LessOrEqual(places, rows)
            square = Shape(later)
            square_heads = Concat <axis = 0> (num_heads_1d, one_1d, square)
            seen_forward = Expand(up_to, square_heads)
            seen_reverse = Expand(later, square_heads)
            seen = Concat <axis = 0> (seen_forward, seen_reverse)
        """
    else:
        lines += "seen = LessOrEqual(places, rows)\n"
    if inverted:
        lines += """
            on_diagonal = Equal(places, rows)
            identity = Cast <to = 1> (on_diagonal)
        """
    width = 1
    while width < inverted:
        # Row blocks with an odd number, and the column block before each.
        lines += f"""
            width_{width} = Constant <value_int = {width}> ()
            block_{width} = Div(places, width_{width})
            row_block_{width} = Unsqueeze(block_{width}, axis1)
            column_next_{width} = Add(block_{width}, one)
            is_next_{width} = Equal(row_block_{width}, column_next_{width})
            row_half_{width} = Mod(row_block_{width}, two)
            is_odd_{width} = Equal(row_half_{width}, one)
            is_between_{width} = And(is_next_{width}, is_odd_{width})
            between_{width} = Cast <to = 1> (is_between_{width})
        """
        width *= 2
    return lines


def _step(has_decay: bool, inverted: int, by_channel: bool) -> str:
    """Return the statements of one chunk: its reads, and the state after it."""
    lines = ""
    if has_decay:
        lines += _factors(by_channel)
        read_query, entered, ended = "decayed_query", "decayed_key", "ended_key"
    else:
        lines += "k_columns = Transpose <perm = [0, 1, 2, 4, 3]> (k)\n"
        read_query, entered, ended = "q", "k", "k"
    lines += _products("q", "query", has_decay, by_channel)
    lines += "visible_pairs = Where(seen, query_pairs, zero_f)\n"
    written = "v"
    if inverted:
        written = "written"
        lines += _products("k", "key", has_decay, by_channel) + _written(inverted, entered)
    lines += f"""
        from_state = MatMul({read_query}, state)
        from_chunk = MatMul(visible_pairs, {written})
        read_chunk = Add(from_state, from_chunk)
        {ended}_rows = Transpose <perm = [0, 1, 2, 4, 3]> ({ended})
        added = MatMul({ended}_rows, {written})
    """
    # The part of the state that rounding leaves out counts in the next chunk.
    kept = "kept_state" if has_decay else "state"
    if has_decay:
        lines += """
            kept_state = Mul(state, last_factor)
            kept_lost = Mul(lost, last_factor)
        """
    return (
        lines
        + f"""
        all_added = Add(added, {"kept_lost" if has_decay else "lost"})
        state_next = Add({kept}, all_added)
        arrived = Sub(state_next, {kept})
        lost_next = Sub(all_added, arrived)
    """
    )


def _factors(by_channel: bool) -> str:
    """Define the factors of the chunk: ``pair_factors``, and those from its start and to its end.

    Each logarithm is a sum of its own: a difference of running sums would lose digits.
    """
    if by_channel:
        lines = """
            row_axis = Constant <value_ints = [4]> ()
            last_channel = Constant <value_ints = [-1]> ()
            later_3d = Unsqueeze(later, last_channel)
            g_rows = Unsqueeze(g, row_axis)
            g_later = Where(later_3d, g_rows, zero_f)
        """
    else:
        lines = "g_later = Where(later, g, zero_f)\n"
    return (
        lines
        + """
        pair_sums = CumSum(g_later, token_axis)
        pair_factors = Exp(pair_sums)
        start_sums = CumSum(g, token_axis)
        start_factors = Exp(start_sums)
        end_sums = CumSum <exclusive = 1, reverse = 1> (g, token_axis)
        end_factors = Exp(end_sums)
        last_factor_row = Gather <axis = 3> (start_factors, last_chunk_place)
        last_factor = Transpose <perm = [0, 1, 2, 4, 3]> (last_factor_row)
        decayed_query = Mul(q, start_factors)
        decayed_key = Mul(k, start_factors)
        ended_key = Mul(k, end_factors)
    """
        + (
            """
        key_axis = Constant <value_ints = [3]> ()
        k_pairs = Unsqueeze(k, key_axis)
        pair_keys = Mul(pair_factors, k_pairs)
    """
            if by_channel
            else "k_columns = Transpose <perm = [0, 1, 2, 4, 3]> (k)\n"
        )
    )


def _products(tensor: str, name: str, has_decay: bool, by_channel: bool) -> str:
    """Define ``<name>_pairs [B, S, G or 1, C, C]``, the decayed products with the keys."""
    if by_channel:
        return f"""
            {name}_column = Unsqueeze({tensor}, last_channel)
            {name}_products = MatMul(pair_keys, {name}_column)
            {name}_pairs = Squeeze({name}_products, last_channel)
        """
    if has_decay:
        return f"""
            {name}_products = MatMul({tensor}, k_columns)
            {name}_pairs = Mul({name}_products, pair_factors)
        """
    return f"{name}_pairs = MatMul({tensor}, k_columns)\n"


def _written(inverted: int, entered: str) -> str:
    """Define ``written``, the corrected values of the delta rule."""
    lines = """
        system = Mul(key_pairs, b)
        between_pairs_1 = Mul(system, between_1)
        inverse_2 = Sub(identity, between_pairs_1)
    """
    width = 2
    while width < inverted:
        lines += f"""
            between_pairs_{width} = Mul(system, between_{width})
            right_{width} = MatMul(between_pairs_{width}, inverse_{width})
            both_{width} = MatMul(inverse_{width}, right_{width})
            inverse_{2 * width} = Sub(inverse_{width}, both_{width})
        """
        width *= 2
    return (
        lines
        + f"""
        retrieved = MatMul({entered}, state)
        missing = Sub(v, retrieved)
        scaled_missing = Mul(missing, b)
        written = MatMul(inverse_{inverted}, scaled_missing)
    """
    )
