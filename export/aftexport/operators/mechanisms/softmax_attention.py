"""Softmax attention: full, causal or in a window, with grouped key heads.

    Y[t] = sum_u exp(s[t,u]) V[u] / (sum_u exp(s[t,u]) + exp(sink))
    s[t,u] = cap(scale Q[t] . K[u]) + bias[clip(u - t, -R, R) + R],  cap(x) = c tanh(x / c)

Vaswani et al., Attention Is All You Need, arXiv 1706.03762, eq. 1, over the counted keys u with
t - window_left <= u <= t + window_right. A window of Beltagy et al., Longformer, arXiv 2004.05150,
section 3.1, has an equal number on both sides; causal attention has 0 on the right. ``softcap`` c
is that of Gemma 2, arXiv 2408.00118, section 2; ``sink`` that of gpt-oss, arXiv 2508.10925; a bias
by distance is that of T5, arXiv 1910.10683, section 2.1, or ALiBi, arXiv 2108.12409. A query that
sees no key gives 0.

The portable body scans blocks of queries, and of the keys it reads only those that a block sees.
Its memory grows with the tokens, not with their square.
"""

from collections.abc import Collection, Mapping
from typing import Any

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators.mechanisms import _grouped_heads as grouped
from aftexport.operators.schema import KV_NUM_HEADS, NUM_HEADS, Attribute, MechanismOperator

_BLOCK = 128
"""The number of queries of a block: a product with it is as fast as a longer one."""

SCALE = Attribute("scale", 0.0, "Factor of the products; 0: one over the square root of d.")
WINDOW_LEFT = Attribute(
    "window_left", -1, "Number of keys that a query sees before its own position; -1: all."
)
WINDOW_RIGHT = Attribute(
    "window_right", -1, "Number of keys that it sees after its position; 0: causal; -1: all."
)
SOFTCAP = Attribute("softcap", 0.0, "Bound c of the scaled products: c tanh(x / c); 0: none.")


def _body(*, present: Collection[str]) -> str:
    lengths = "key_lengths" if "key_lengths" in present else "lengths"
    added = tuple(name for name in ("sink", "bias") if name in present)
    lines = text.inputs_as_float("query", "key", "value", *added, sequence="key")
    lines += text.valid_keys(lengths) + _heads_body() + _blocks_body() + _window_body()
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
            outputs={"attended": "attended_blocks"},
            ranks=ranks | {"block": 5, "start": 1, "attended": 5},
            axis=0,
        )
        + """
        by_token = Transpose <perm = [1, 0, 4, 2, 3, 5]> (attended_blocks)
        joined_shape = Concat <axis = 0> (batch, padded_tokens, infer)
        joined = Reshape(by_token, joined_shape)
        result = Slice(joined, zero_1d, query_tokens, axis1)
    """
        + text.output("result")
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
        key_columns = Transpose <perm = [0, 2, 3, 4, 1]> (keys_by_token)
        value_heads = Transpose <perm = [0, 2, 3, 1, 4]> (values_by_token)
        counted = Where(valid, zero_f, masked)
        mask_axes = Constant <value_ints = [1, 2, 3]> ()
        key_mask = Unsqueeze(counted, mask_axes)
        head_rows = Concat <axis = 0> (one_1d, groups_1d, group_1d, one_1d, one_1d)
    """


def _blocks_body() -> str:
    """Define the scaled queries in blocks, ``[blocks, B, G, R, size, d]``, and their positions."""
    return f"""
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
        scaled = Mul(query_f, scale)
        padded = Pad(scaled, block_pads, , axis1)
        split_shape = Concat <axis = 0> (batch, blocks, size, groups_1d, group_1d, head_width)
        split = Reshape(padded, split_shape)
        query_blocks = Transpose <perm = [1, 0, 3, 4, 2, 5]> (split)
        block_count = Squeeze(blocks)
        numbers = Range(zero, block_count, one)
        first_rows = Mul(numbers, size)
        float_starts = Cast <to = 1> (first_rows)
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
    lines = "all_tokens = Max(tokens, query_tokens)\n"
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


def _sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    return grouped.sizes(attributes) | {"H": attributes["num_heads"], "W": 5}


SOFTMAX_ATTENTION = MechanismOperator(
    op_type="SoftmaxAttention",
    stem="softmax_attention",
    inputs=("query", "key", "value", "sink", "bias", "lengths", "key_lengths"),
    shapes=("B T Q", "B S K", "B S V", "H", "H W", "B", "B"),
    optional=("sink", "bias", "key_lengths"),
    exponents=(),
    libraries=("onnxruntime",),
    attributes=(NUM_HEADS, SCALE, WINDOW_LEFT, WINDOW_RIGHT, SOFTCAP, KV_NUM_HEADS),
    body=_body,
    sizes=_sizes,
    doc=(
        "Softmax attention (arXiv 1706.03762, eq. 1): query [B, T, num_heads * d], "
        "key [B, S, kv_num_heads * d], value [B, S, kv_num_heads * e], heads packed in the "
        "channels. A query sees the counted keys from window_left before its position to "
        "window_right after it. S may differ from T if key_lengths [B] gives the numbers of keys. "
        "sink [num_heads] is a logit without a value; bias [num_heads, 2R + 1] is added by the "
        "distance of the key, from -R to R, and beyond them as at these."
    ),
)
onnx.defs.register_schema(SOFTMAX_ATTENTION.schema())
