"""Recurrent linear attention: a state of key^T value, with decay and the delta rule.

    S[t] = exp(g[t]) S[t-1] + K[t]^T V'[t],  Y[t] = scale Q[t] S[t]

V' is V, or with the delta rule beta[t] (V[t] - K[t] exp(g[t]) S[t-1]). This is the ONNX operator
``LinearAttention`` (opset 27): Yang et al., Gated Linear Attention, arXiv 2312.06635, eq. 3, and
Gated Delta Networks, arXiv 2412.06464, eq. 10. Beyond it, there are lengths, directions and a
normalizer. Runtimes match built-in operators only by name, so this one has a name of its own.

``torch_ops.recurrent_linear_attention`` has the formulas of the loop over chunks of tokens. The
triangular system of the delta rule is inverted by blocks: with X the inverse of the blocks of s
tokens on the diagonal and B the part of A between two neighbours, that of blocks of 2 s tokens is
X - X B X. A Neumann series would cancel.
"""

from collections.abc import Mapping
from typing import Any

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.schema import STATE_OUTPUT, Attribute, MechanismOperator

GATED_RULES = ("gated", "gated_delta")
"""The update rules with a decay."""
DELTA_RULES = ("delta", "gated_delta")
"""The update rules with beta."""


def recurrence_body(
    *,
    update_rule: str,
    direction: str,
    normalizer: str,
    decay_granularity: str,
    present: frozenset[str],
) -> str:
    """Return the body for the settings and for the optional inputs that are present."""
    # Both directions are heads of one loop: the tokens of the reverse direction are turned around.
    has_decay = update_rule in GATED_RULES
    has_beta = update_rule in DELTA_RULES
    _check_present(update_rule, {"decay": has_decay, "beta": has_beta}, present)
    by_channel = has_decay and decay_granularity == "channel"
    lines = text.inputs_as_float("query", "key", "value", *sorted(present)) + text.valid_keys()
    lines += _heads(normalizer == "sum")
    tensors = {"q": "queries", "k": "keys", "v": "values"}
    if has_decay:
        lines += _decays(by_channel)
        tensors["g"] = "decays"
    if has_beta:
        lines += _betas()
        tensors["b"] = "betas"
    ordered = {name: f"{tensor}_ordered" for name, tensor in tensors.items()}
    lines += _order(direction, tensors, ordered) + _past("past_state" in present, ordered)
    lines += _chunk_loop(
        ordered, by_channel=by_channel, reads_reverse_before=direction == "bidirectional"
    )
    return lines + _directions_joined(direction) + _results(normalizer == "sum")


def _check_present(rule: str, needed: dict[str, bool], present: frozenset[str]) -> None:
    for name, is_needed in needed.items():
        if (name in present) != is_needed:
            raise ValueError(
                f"RecurrentLinearAttention: update_rule {rule} "
                f"{'requires' if is_needed else 'forbids'} the input {name}"
            )


def _heads(is_summed: bool) -> str:
    """Define ``queries [B, T, H, G, dk]``, ``keys`` and ``values [B, T, H, 1, *]``; 0 if padded."""
    # With a normalizer, the values have one more channel, which is 1.
    lines = """
        q_num_heads = Constant <value_int: int = @q_num_heads> ()
        num_heads = Constant <value_int: int = @kv_num_heads> ()
        num_heads_1d = Unsqueeze(num_heads, zero)
        group = Div(q_num_heads, num_heads)
        group_1d = Unsqueeze(group, zero)
        keep_two = Constant <value_ints = [0, 0]> ()
        infer = Constant <value_ints = [-1]> ()
        packed_shape = Concat <axis = 0> (keep_two, infer)
        query_shape = Concat <axis = 0> (keep_two, num_heads_1d, group_1d, infer)
        row_shape = Concat <axis = 0> (keep_two, num_heads_1d, one_1d, infer)
        valid_3d = Unsqueeze(valid, axis2)
        valid_query = Where(valid_3d, query_f, zero_f)
        valid_key = Where(valid_3d, key_f, zero_f)
        valid_value = Where(valid_3d, value_f, zero_f)
        queries = Reshape(valid_query, query_shape)
        keys = Reshape(valid_key, row_shape)
    """
    if not is_summed:
        return lines + "values = Reshape(valid_value, row_shape)\n"
    return (
        lines
        + """
        only_values = Reshape(valid_value, row_shape)
        last_axis = Constant <value_ints = [-1]> ()
        first_channel = Slice(only_values, zero_1d, one_1d, last_axis)
        ones_shape = Shape(first_channel)
        ones = ConstantOfShape <value = float[1] {1.0}> (ones_shape)
        values = Concat <axis = 4> (only_values, ones)
    """
    )


def _decays(by_channel: bool) -> str:
    """Define ``decays [B, T, H, 1, dk or 1]``, logarithms; that of padding is 0."""
    shape = "row_shape" if by_channel else "head_decay_shape"
    return f"""
        head_decay_shape = Concat <axis = 0> (keep_two, num_heads_1d, one_1d, one_1d)
        valid_decay = Where(valid_3d, decay_f, zero_f)
        decays = Reshape(valid_decay, {shape})
    """


def _betas() -> str:
    """Define ``betas [B, T, H, 1, 1]``; that of padding is 0."""
    return """
        beta_lead = Shape <start = 0, end = 2> (beta)
        beta_shape = Concat <axis = 0> (beta_lead, num_heads_1d)
        beta_heads = Expand(beta_f, beta_shape)
        valid_beta = Where(valid_3d, beta_heads, zero_f)
        betas = Reshape(valid_beta, row_shape)
    """


def _order(direction: str, tensors: dict[str, str], ordered: dict[str, str]) -> str:
    """Define the tensors in the order of the recurrence; ``bidirectional`` doubles the heads."""
    if direction == "forward":
        return "".join(f"{ordered[n]} = Identity({x})\n" for n, x in tensors.items())
    lines = """
        last_place = Sub(end, one)
        below = Constant <value_int = -1> ()
        backwards = Range(last_place, below, below)
    """
    for name, tensor in tensors.items():
        if direction == "reverse":
            lines += f"{ordered[name]} = Gather <axis = 1> ({tensor}, backwards)\n"
        else:
            lines += f"""
                {tensor}_backwards = Gather <axis = 1> ({tensor}, backwards)
                {ordered[name]} = Concat <axis = 2> ({tensor}, {tensor}_backwards)
            """
    return lines


def _past(is_given: bool, ordered: dict[str, str]) -> str:
    """Define ``past``, ``[B, S, 1, dk, E]``, and ``nothing``, zeros of the same shape."""
    lines = f"""
        batch = Shape <start = 0, end = 1> (query)
        state_count = Shape <start = 2, end = 3> ({ordered["k"]})
        key_width = Shape <start = 4, end = 5> ({ordered["k"]})
        value_width = Shape <start = 4, end = 5> ({ordered["v"]})
        past_shape = Concat <axis = 0> (batch, state_count, one_1d, key_width, value_width)
        nothing = ConstantOfShape <value = float[1] {{0.0}}> (past_shape)
    """
    if is_given:
        return lines + "past = Unsqueeze(past_state_f, axis2)\n"
    return lines + "past = Identity(nothing)\n"


def _directions_joined(direction: str) -> str:
    """Define ``read [B, T, H, G, E]`` from ``read_ordered``."""
    if direction == "forward":
        return "read = Identity(read_ordered)\n"
    if direction == "reverse":
        return "read = Gather <axis = 1> (read_ordered, backwards)\n"
    return """
        all_states = Constant <value_ints = [9223372036854775807]> ()
        read_forward = Slice(read_ordered, zero_1d, num_heads_1d, axis2)
        read_backwards = Slice(read_ordered, num_heads_1d, all_states, axis2)
        read_reverse = Gather <axis = 1> (read_backwards, backwards)
        read = Add(read_forward, read_reverse)
    """


def _results(is_summed: bool) -> str:
    """Define the outputs from ``read`` and from the last state."""
    if is_summed:
        lines = (
            text.constants(min_eps=MIN_EPS)
            + """
            last_1d = Constant <value_ints = [-1]> ()
            far_1d = Constant <value_ints = [9223372036854775807]> ()
            numerator = Slice(read, zero_1d, last_1d, last_axis)
            total = Slice(read, last_1d, far_1d, last_axis)
            eps = Constant <value_float: float = @eps> ()
            positive_eps = Max(eps, min_eps)
            positive = Add(total, positive_eps)
            result = Div(numerator, positive)
        """
        )
    else:
        lines = """
            given_scale = Constant <value_float: float = @scale> ()
            key_width_f = Cast <to = 1> (key_width)
            root = Sqrt(key_width_f)
            usual_scale = Reciprocal(root)
            no_scale = Equal(given_scale, zero_f)
            scale = Where(no_scale, usual_scale, given_scale)
            result = Mul(read, scale)
        """
    return (
        lines
        + f"""
        packed = Reshape(result, packed_shape)
        valid_result = Where(valid_3d, packed, zero_f)
        output = CastLike(valid_result, query)
        state_4d = Squeeze(state_last, axis2)
        {STATE_OUTPUT} = CastLike(state_4d, query)
    """
    )


_CHUNK = 64
_DELTA_CHUNK = 32
_CHANNEL_CHUNK = 16
"""Numbers of tokens in a chunk. An inverse costs more in longer chunks; with a decay for each
channel each pair has as many factors as channels."""


def _chunk_loop(ordered: dict[str, str], *, by_channel: bool, reads_reverse_before: bool) -> str:
    """Define ``read_ordered [B, T, S, G, E]`` and ``state_last [B, S, 1, dk, E]``.

    Reads ``past`` and ``nothing``, and the tensors ``ordered``, ``[B, T, S, G or 1, *]``.
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
    """Define the chunk's factors: ``pair_factors``, and those from its start and to its end."""
    # Each logarithm is a sum of its own: a difference of running sums would lose digits.
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


__all__ = ["DELTA_RULES", "GATED_RULES", "RECURRENT_LINEAR_ATTENTION"]

ATTRIBUTES = (
    Attribute(
        "update_rule",
        "gated_delta",
        "gated: with decay; delta: with beta, which corrects the value that the key retrieves.",
        ("linear", "gated", "delta", "gated_delta"),
    ),
    Attribute(
        "direction",
        "forward",
        "Order of the tokens. bidirectional: the sum of both directions, each token once.",
        ("forward", "reverse", "bidirectional"),
    ),
    Attribute(
        "normalizer",
        "none",
        "sum: divides by the product of the query with the decayed sum of keys, plus eps; "
        "only for linear and gated.",
        ("none", "sum"),
    ),
    Attribute(
        "decay_granularity",
        "head",
        "head: one decay for each head; channel: one for each channel of the key.",
        ("head", "channel"),
    ),
    Attribute("q_num_heads", 1, "Number of query heads; a multiple of kv_num_heads."),
    Attribute(
        "kv_num_heads",
        1,
        "Number of heads of keys, values and states. Query head i reads the state of head "
        "i // (q_num_heads / kv_num_heads).",
    ),
    Attribute("scale", 0.0, "Factor of the output; 0 means 1 / sqrt(dk). A normalizer cancels it."),
    Attribute(
        "eps",
        1e-6,
        f"Added to the normalizer; keeps it from being zero. Below {MIN_EPS:g} it counts as that.",
    ),
)


def _sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    heads, channels = int(attributes["kv_num_heads"]), 8
    is_summed = attributes["normalizer"] == "sum"
    by_channel = attributes["decay_granularity"] == "channel"
    return {
        "QD": int(attributes["q_num_heads"]) * channels,
        "KD": heads * channels,
        "VD": heads * channels,
        "H": heads,
        "G": heads * channels if by_channel else heads,
        "S": heads * (2 if attributes["direction"] == "bidirectional" else 1),
        "dk": channels,
        "E": channels + is_summed,
    }


def _nonnegative(attributes: Mapping[str, Any]) -> dict[str, int]:
    """Return the inputs whose products are the terms of a divisor, which could cancel."""
    # Of the state, only the last column enters the divisor.
    is_summed = attributes["normalizer"] == "sum"
    return {"query": 0, "key": 0, "past_state": -1} if is_summed else {}


RECURRENT_LINEAR_ATTENTION = MechanismOperator(
    op_type="RecurrentLinearAttention",
    stem="recurrent_linear_attention",
    inputs=("query", "key", "value", "past_state", "decay", "beta", "lengths"),
    shapes=("B T QD", "B T KD", "B T VD", "B S dk E", "B T G", "B T H", "B"),
    libraries=("onnxruntime",),
    optional=("past_state", "decay", "beta"),
    outputs=("output", STATE_OUTPUT),
    exponents=(),
    ranges={"key": (-0.5, 0.5), "decay": (-1.0, 0.0), "beta": (0.0, 1.0)},
    attributes=ATTRIBUTES,
    body=recurrence_body,
    sizes=_sizes,
    nonnegative=_nonnegative,
    doc="Recurrent linear attention (arXiv 2312.06635, arXiv 2412.06464): query [B, T, Hq dk], "
    "key [B, T, H dk], value [B, T, H dv], decay in log space [B, T, H] or [B, T, H dk], beta "
    "[B, T, H] or [B, T, 1]. past_state and present_state are [B, S, dk, E]: E is dv, or dv + 1 "
    "with a normalizer, whose sum is the last column; S is H, or 2 H if bidirectional, the "
    "forward states first.",
)
onnx.defs.register_schema(RECURRENT_LINEAR_ATTENTION.schema())
