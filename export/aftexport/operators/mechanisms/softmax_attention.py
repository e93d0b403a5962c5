"""Softmax attention: full, causal or in a window, with grouped key heads.

    Y[t] = sum_u exp(s[t,u]) V[u] / D[t],  D[t] = sum_u exp(s[t,u]) + exp(sink),  log_sum = log D
    s[t,u] = cap(scale q[t] . k[u]) + bias[clip(u - t, -R, R) + R],  cap(x) = c tanh(x / c)

Vaswani et al., Attention Is All You Need, arXiv 1706.03762, eq. 1, over the counted keys u with
t - window_left <= u <= t + window_right. A window of Beltagy et al., Longformer, arXiv 2004.05150,
section 3.1, has an equal number on both sides; causal attention has 0 on the right. ``softcap`` c
is that of Gemma 2, arXiv 2408.00118, section 2; ``sink`` that of gpt-oss, arXiv 2508.10925; a bias
by distance is that of T5, arXiv 1910.10683, section 2.1, or ALiBi, arXiv 2108.12409. A query that
sees no key gives 0.

q and k are Q and K, or with ``cos_cache`` and ``sin_cache`` rotated by their positions (Su et al.,
RoFormer, arXiv 2104.09864, eq. 34). Key u has position u, and query t of the tensor position
t + query_start. ``log_sum`` merges results over disjoint keys, as in FlashAttention, arXiv
2205.14135, section 3.1.

The portable body scans blocks of queries, and of the keys it reads only those that a block sees.
Its memory grows with the tokens, not with their square.
"""

from collections.abc import Collection, Mapping
from typing import Any

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators.mechanisms import _grouped_heads as grouped
from aftexport.operators.schema import (
    KV_NUM_HEADS,
    LOG_SUM_OUTPUT,
    NUM_HEADS,
    Attribute,
    MechanismOperator,
)

_BLOCK = 128
"""The number of queries of a block: a product with it is as fast as a longer one."""

SCALE = Attribute("scale", 0.0, "Factor of the products; 0: one over the square root of d.")
WINDOW_LEFT = Attribute(
    "window_left", -1, "Number of keys that a query sees before its own position; -1: all."
)
WINDOW_RIGHT = Attribute(
    "window_right", -1, "Number of keys that it sees after its position; 0: causal; -1: all."
)
INTERLEAVED = Attribute(
    "interleaved",
    0,
    "Channels that are rotated together: 0: c and c + r / 2; 1: 2c and 2c + 1, for c < r / 2.",
    is_cpu_only=True,
)
SOFTCAP = Attribute("softcap", 0.0, "Bound c of the scaled products: c tanh(x / c); 0: none.")


PRECISION = Attribute(
    "precision",
    "fp32",
    "Precision of both products: fp32; bf16, with operands rounded to bfloat16 and sums in "
    "float32; int8 means bf16, since whole numbers lose small weights. The fallback computes "
    "in float32.",
)


def _body(*, present: Collection[str]) -> str:
    lengths = "key_lengths" if "key_lengths" in present else "lengths"
    added = tuple(name for name in _FLOAT_OPTIONS if name in present)
    is_rotated, has_log_sum = "cos_cache" in present, LOG_SUM_OUTPUT in present
    lines = text.inputs_as_float("query", "key", "value", *added, sequence="key")
    lines += text.valid_keys(lengths) + _heads_body()
    start = "query_start" if "query_start" in present else "zero_1d"
    # OpenVINO must know that it is one number.
    lines += f"first_position = Reshape({start}, one_1d)\n"
    lines += _rotation_body() if is_rotated else "key_columns_by_token = Identity(keys_by_token)\n"
    lines += _blocks_body("rotated_queries" if is_rotated else "query_f") + _window_body()
    lines += """
        softcap = Constant <value_float: float = @softcap> ()
        cap = Unsqueeze(softcap, zero)
    """
    if "sink" in present:
        lines += "sink_heads = Reshape(sink_f, head_rows)\n"
    states, ranks = _states(present)
    return (
        lines
        + text.scan(
            _step(present),
            states=states,
            scanned={"block": "query_blocks", "start": "block_starts"},
            outputs={"attended": "attended_blocks"}
            | ({"divisor_log": "divisor_log_blocks"} if has_log_sum else {}),
            ranks=ranks | {"block": 5, "start": 1, "attended": 5, "divisor_log": 5},
            axis=0,
        )
        + "joined_shape = Concat <axis = 0> (batch, padded_tokens, infer)\n"
        + _by_token("attended_blocks", "result")
        + text.output("result")
        + (_by_token("divisor_log_blocks", LOG_SUM_OUTPUT) if has_log_sum else "")
    )


def _by_token(blocks: str, result: str) -> str:
    """Define the rows ``[B, T, H * e]`` of blocks ``[blocks, B, G, R, size, e]``."""
    return f"""
        {result}_first = Transpose <perm = [1, 0, 4, 2, 3, 5]> ({blocks})
        {result}_joined = Reshape({result}_first, joined_shape)
        {result} = Slice({result}_joined, zero_1d, query_tokens, axis1)
    """


def _rotation_body() -> str:
    """Define ``key_columns_by_token`` and ``rotated_queries``, rotated by their positions.

    Only positions of padding may lie outside of the caches, and count as their ends.
    """
    lines = """
        interleaved = Constant <value_int: int = @interleaved> ()
        is_interleaved = Greater(interleaved, zero)
        half = Shape <start = 1, end = 2> (cos_cache)
        turned = Add(half, half)
        two_1d = Add(one_1d, one_1d)
        channel_axis = Sub(zero_1d, one_1d)
        cached = Shape <start = 0, end = 1> (cos_cache)
        last_cached = Sub(cached, one_1d)
        pair_step = Where(is_interleaved, two_1d, one_1d)
        first_end = Where(is_interleaved, turned, half)
        second_start = Where(is_interleaved, one_1d, half)
        all_channels = Constant <value_ints = [9223372036854775807]> ()
        query_rows = Shape <start = 1, end = 2> (query)
        query_heads = Unsqueeze(num_heads, zero)
        query_heads_shape = Concat <axis = 0> (batch, query_rows, query_heads, infer)
        queries_by_token = Reshape(query_f, query_heads_shape)
        key_heads_shape = Concat <axis = 0> (batch, tokens, groups_1d, infer)
        keys_by_head = Reshape(keys_by_token, key_heads_shape)
    """
    lines += _rotated("keys_by_head", "rotated_keys", count="tokens", start="zero_1d")
    lines += _rotated("queries_by_token", "turned_queries", count="query_rows")
    return (
        lines
        + """
        key_columns_by_token = Reshape(rotated_keys, key_shape)
        query_shape = Shape(query)
        rotated_queries = Reshape(turned_queries, query_shape)
    """
    )


def _rotated(x: str, result: str, *, count: str, start: str = "first_position") -> str:
    """Define ``result``: heads ``[B, count, heads, d]`` rotated by positions from a start on."""
    lines = f"""
        {result}_count = Squeeze({count})
        {result}_range = Range(zero, {result}_count, one)
        {result}_places = Add({result}_range, {start})
        {result}_from = Max({result}_places, zero_1d)
        {result}_rows = Min({result}_from, last_cached)
        {result}_rest = Slice({x}, turned, all_channels, channel_axis)
        {result}_a = Slice({x}, zero_1d, first_end, channel_axis, pair_step)
        {result}_b = Slice({x}, second_start, turned, channel_axis, pair_step)
    """
    for name in ("cos", "sin"):
        lines += f"""
            {result}_{name}_rows = Gather <axis = 0> ({name}_cache_f, {result}_rows)
            {result}_{name} = Unsqueeze({result}_{name}_rows, axis1)
        """
    return (
        lines
        + f"""
        {result}_a_cos = Mul({result}_a, {result}_cos)
        {result}_b_sin = Mul({result}_b, {result}_sin)
        {result}_b_cos = Mul({result}_b, {result}_cos)
        {result}_a_sin = Mul({result}_a, {result}_sin)
        {result}_first = Sub({result}_a_cos, {result}_b_sin)
        {result}_second = Add({result}_b_cos, {result}_a_sin)
        {result}_halves = Concat <axis = -1> ({result}_first, {result}_second)
        {result}_first_column = Unsqueeze({result}_first, channel_axis)
        {result}_second_column = Unsqueeze({result}_second, channel_axis)
        {result}_columns = Concat <axis = -1> ({result}_first_column, {result}_second_column)
        {result}_shape = Shape({result}_halves)
        {result}_pairs = Reshape({result}_columns, {result}_shape)
        {result}_turned = Where(is_interleaved, {result}_pairs, {result}_halves)
        {result} = Concat <axis = -1> ({result}_turned, {result}_rest)
    """
    )


def _heads_body() -> str:
    """Define keys ``[B, G, 1, d, S]``, values ``[B, G, 1, S, e]``, and their mask ``[B,1,1,1,S]``.

    Padding counts as 0, since 0 times infinity would be NaN.
    """
    return """
        num_heads = Constant <value_int: int = @num_heads> ()
        given_kv_heads = Constant <value_int: int = @kv_num_heads> ()
        heads_are_shared = Greater(given_kv_heads, zero)
        kv_num_heads = Where(heads_are_shared, given_kv_heads, num_heads)
        group = Div(num_heads, kv_num_heads)
        groups_1d = Unsqueeze(kv_num_heads, zero)
        group_1d = Unsqueeze(group, zero)
        infer = Constant <value_ints = [-1]> ()
        batch = Shape <start = 0, end = 1> (key)
        key_shape = Concat <axis = 0> (batch, tokens, groups_1d, one_1d, infer)
        valid_3d = Unsqueeze(valid, axis2)
        some_keys = Where(valid_3d, key_f, zero_f)
        some_values = Where(valid_3d, value_f, zero_f)
        keys_by_token = Reshape(some_keys, key_shape)
        values_by_token = Reshape(some_values, key_shape)
        value_heads = Transpose <perm = [0, 2, 3, 1, 4]> (values_by_token)
        counted = Where(valid, zero_f, masked)
        mask_axes = Constant <value_ints = [1, 2, 3]> ()
        key_mask = Unsqueeze(counted, mask_axes)
        head_rows = Concat <axis = 0> (one_1d, groups_1d, group_1d, one_1d, one_1d)
    """


def _blocks_body(queries: str) -> str:
    """Define the scaled queries in blocks, ``[blocks, B, G, R, size, d]``, and their positions."""
    return f"""
        key_columns = Transpose <perm = [0, 2, 3, 4, 1]> (key_columns_by_token)
        most_rows = Constant <value_ints = [{_BLOCK}]> ()
        query_tokens = Shape <start = 1, end = 2> (query)
        size = Min(query_tokens, most_rows)
        tokens_up = Add(query_tokens, size)
        tokens_up_less = Sub(tokens_up, one_1d)
        blocks = Div(tokens_up_less, size)
        padded_tokens = Mul(blocks, size)
        missing = Sub(padded_tokens, query_tokens)
        block_pads = Concat <axis = 0> (zero_1d, missing)
        num_heads_1d = Unsqueeze(num_heads, zero)
        channels = Shape <start = 2, end = 3> (query)
        head_width = Div(channels, num_heads_1d)
        float_width = Cast <to = 1> (head_width)
        root = Sqrt(float_width)
        root_scale = Reciprocal(root)
        given_scale = Constant <value_float: float = @scale> ()
        has_scale = Greater(given_scale, zero_f)
        scale = Where(has_scale, given_scale, root_scale)
        scaled = Mul({queries}, scale)
        padded = Pad(scaled, block_pads, , axis1)
        split_shape = Concat <axis = 0> (batch, blocks, size, groups_1d, group_1d, head_width)
        split = Reshape(padded, split_shape)
        query_blocks = Transpose <perm = [1, 0, 3, 4, 2, 5]> (split)
        block_count = Squeeze(blocks)
        numbers = Range(zero, block_count, one)
        first_rows = Mul(numbers, size)
        first_positions = Add(first_rows, first_position)
        float_starts = Cast <to = 1> (first_positions)
        block_starts = Unsqueeze(float_starts, axis1)
        size_scalar = Squeeze(size)
        row_numbers = Range(zero, size_scalar, one)
        float_rows = Cast <to = 1> (row_numbers)
        block_rows = Unsqueeze(float_rows, axis1)
    """


def _window_body() -> str:
    """Define ``window_offsets``, the keys of a block from its first one on, and ``window_bounds``.

    These are the keys seen on the left, those on the right, and the last place of a first key.
    All are floats, which hold them exactly up to 2**24.
    """
    lines = """
        most_tokens = Max(tokens, query_tokens)
        shift = Abs(first_position)
        all_tokens = Add(most_tokens, shift)
    """
    for side in ("left", "right"):
        lines += f"""
            {side}_given = Constant <value_int: int = @window_{side}> ()
            {side}_is_all = Less({side}_given, zero)
            {side}_or_all = Where({side}_is_all, all_tokens, {side}_given)
            {side} = Min({side}_or_all, all_tokens)
        """
    return (
        lines
        + """
        sides = Add(left, right)
        window = Add(sides, size)
        context = Min(window, tokens)
        last_first = Sub(tokens, context)
        context_scalar = Squeeze(context)
        context_range = Range(zero, context_scalar, one)
        window_offsets = Cast <to = 1> (context_range)
        int_bounds = Concat <axis = 0> (left, right, last_first)
        window_bounds = Cast <to = 1> (int_bounds)
    """
    )


def _states(present: Collection[str]) -> tuple[dict[str, str], dict[str, int]]:
    """Return what every step of the scan reads, and the rank of each.

    The names are states, since OpenVINO's Scan shows its body no values outside.
    """
    given = [
        ("keys", "key_columns", 5),
        ("values", "value_heads", 5),
        ("mask", "key_mask", 5),
        ("offsets", "window_offsets", 1),
        ("rows", "block_rows", 2),
        ("bounds", "window_bounds", 1),
        ("limit", "cap", 1),
    ]
    given += [("sinks", "sink_heads", 5)] if "sink" in present else []
    given += [("biases", "bias_f", 2)] if "bias" in present else []
    return {name: value for name, value, _ in given}, {name: rank for name, _, rank in given}


def _step(present: Collection[str]) -> str:
    """Return the attention of one block of queries ``[B, G, R, size, d]``."""
    lines = """
        step_zero = Constant <value_float = 0.0> ()
        step_masked = Constant <value_float = -inf> ()
        at_left = Constant <value_ints = [0]> ()
        at_right = Constant <value_ints = [1]> ()
        at_last = Constant <value_ints = [2]> ()
        last_axis = Constant <value_ints = [4]> ()
        reach_left = Gather <axis = 0> (bounds, at_left)
        reach_right = Gather <axis = 0> (bounds, at_right)
        last = Gather <axis = 0> (bounds, at_last)
        wanted = Sub(start, reach_left)
        not_before = Max(wanted, step_zero)
        first = Min(not_before, last)
        places = Add(offsets, first)
        index = Cast <to = 7> (places)
        seen_keys = Gather <axis = 4> (keys, index)
        seen_values = Gather <axis = 3> (values, index)
        seen_mask = Gather <axis = 4> (mask, index)
        positions_of_rows = Add(rows, start)
        distance = Sub(places, positions_of_rows)
        least = Neg(reach_left)
        is_right_of = GreaterOrEqual(distance, least)
        is_left_of = LessOrEqual(distance, reach_right)
        is_inside = And(is_right_of, is_left_of)
        window_mask = Where(is_inside, seen_mask, step_masked)
        products = MatMul(block, seen_keys)
        is_capped = Greater(limit, step_zero)
        is_capped_scalar = Squeeze(is_capped)
        capped = If (is_capped_scalar) <
            then_branch = capped_form () => (capped_products) {
                part = Div(products, limit)
                bounded = Tanh(part)
                capped_products = Mul(bounded, limit)
            },
            else_branch = plain_form () => (plain_products) {
                plain_products = Identity(products)
            }
        >
    """
    logits = "capped"
    if "bias" in present:
        lines += _bias_body()
        logits = "biased"
    lines += f"masked_logits = Add({logits}, window_mask)\n"
    lines += _sink_body() if "sink" in present else "weights = Softmax <axis = 4> (masked_logits)\n"
    lines += """
        largest_mask = ReduceMax <keepdims = 1> (window_mask, last_axis)
        sees_none = Less(largest_mask, step_zero)
        sums = MatMul(weights, seen_values)
        attended = Where(sees_none, step_zero, sums)
    """
    if LOG_SUM_OUTPUT in present:
        lines += _log_sum_body(present)
    return lines + "".join(f"{name}_next = Identity({name})\n" for name in _states(present)[0])


def _bias_body() -> str:
    """Define ``biased``: the products and the bias of each distance, which its ends bound."""
    return """
        bias_width = Shape <start = 1, end = 2> (biases)
        step_two = Constant <value_ints = [2]> ()
        bias_reach = Div(bias_width, step_two)
        least_reach = Neg(bias_reach)
        int_distance = Cast <to = 7> (distance)
        not_below = Max(int_distance, least_reach)
        bounded_distance = Min(not_below, bias_reach)
        bias_index = Add(bounded_distance, bias_reach)
        bias_of_heads = Gather <axis = 1> (biases, bias_index)
        bias_lead = Constant <value_ints = [1]> ()
        products_shape = Shape <start = 1> (products)
        bias_shape = Concat <axis = 0> (bias_lead, products_shape)
        bias_by_group = Reshape(bias_of_heads, bias_shape)
        biased = Add(capped, bias_by_group)
    """


def _sink_body() -> str:
    """Define ``weights``: the softmax over the keys and the sink, without the sink."""
    return """
        no_key = ReduceMax <keepdims = 1> (masked_logits, last_axis)
        sink_shape = Shape(no_key)
        sink_column = Expand(sinks, sink_shape)
        with_sink = Concat <axis = 4> (masked_logits, sink_column)
        all_weights = Softmax <axis = 4> (with_sink)
        key_count = Shape <start = 4, end = 5> (masked_logits)
        weights = Slice(all_weights, at_left, key_count, last_axis)
    """


def _log_sum_body(present: Collection[str]) -> str:
    """Define ``divisor_log`` by the largest weight, which is exp(largest logit) / divisor."""
    has_sink = "sink" in present
    weights, logits = ("all_weights", "with_sink") if has_sink else ("weights", "masked_logits")
    lines = f"""
        largest_weight = ReduceMax <keepdims = 1> ({weights}, last_axis)
        largest_logit = ReduceMax <keepdims = 1> ({logits}, last_axis)
        log_weight = Log(largest_weight)
        log_of_seen = Sub(largest_logit, log_weight)
    """
    if has_sink:
        return lines + "divisor_log = Identity(log_of_seen)\n"
    return lines + "divisor_log = Where(sees_none, step_masked, log_of_seen)\n"


def _sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    beside = {"H": attributes["num_heads"], "W": 5, "P": 96, "C": 4, "1": 1}
    return grouped.sizes(attributes) | beside


_FLOAT_OPTIONS = ("sink", "bias", "cos_cache", "sin_cache")


SOFTMAX_ATTENTION = MechanismOperator(
    op_type="SoftmaxAttention",
    stem="softmax_attention",
    inputs=(
        *("query", "key", "value", "sink", "bias", "lengths", "key_lengths"),
        *("cos_cache", "sin_cache", "query_start"),
    ),
    shapes=("B T Q", "B S K", "B S V", "H", "H W", "B", "B", "P C", "P C", "1"),
    outputs=("output", LOG_SUM_OUTPUT),
    optional=(*_FLOAT_OPTIONS, "key_lengths", "query_start", LOG_SUM_OUTPUT),
    exponents=(),
    libraries=("onnxruntime",),
    attributes=(NUM_HEADS, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, KV_NUM_HEADS, INTERLEAVED),
    kernel_attributes=(PRECISION,),
    body=_body,
    sizes=_sizes,
    doc=(
        "Softmax attention (arXiv 1706.03762, eq. 1): query [B, T, num_heads * d], "
        "key [B, S, kv_num_heads * d], value [B, S, kv_num_heads * e], heads packed in the "
        "channels. A query sees the counted keys from window_left before its position to "
        "window_right after it. S may differ from T if key_lengths [B] gives the numbers of keys. "
        "sink [num_heads] is a logit without a value; bias [num_heads, 2R + 1] is added by the "
        "distance of the key, from -R to R, and beyond them as at these. cos_cache and sin_cache "
        "[P, r / 2] rotate the first r channels of each head of query and key by their positions "
        "(arXiv 2104.09864, eq. 34); P is at least T and S. Key u has position u, query t position "
        "query_start + t; query_start [1] is 0 if absent, and comes with key_lengths. log_sum "
        "[B, T, num_heads], float32, is the logarithm of the divisor, -inf where that is 0."
    ),
)
onnx.defs.register_schema(SOFTMAX_ATTENTION.schema())
