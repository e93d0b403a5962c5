"""AFT-local: a learned bias for the keys within a window of the query.

    Y[t] = gate(Q[t]) * sum_u exp(K[u] + w'[t,u]) V[u] / (sum_u exp(K[u] + w'[t,u]) + eps)
    w'[t,u] = w[t,u] where |t - u| < s, else 0

Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 4; eps is 0 there. Keys
outside the window have bias 0. Only the band of w is stored, never a T x T matrix.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanisms import _windowed as windowed
from aftexport.operators.schema import DENOMINATOR_EPS, GATE, Mechanism


def _body(*, gate: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value", "band")
    lines += text.log_eps()
    lines += text.mask("key_f", "logits_3d", rank=3)
    lines += text.constants(two_1d=[2], smallest_block=[32])
    lines += "width = Shape <start = 1, end = 2> (band_f)\n"
    lines += "left = Sub(width, one_1d)\n" if causal else "left = Div(width, two_1d)\n"
    lines += _pair_body() + _band_weights_body() + _diagonal_body() + _inside_body()
    lines += windowed.outside_body(causal)
    lines += """
        outside_weighted = Mul(outside_weight, outside)
        sums = Add(inside, outside_weighted)
        numerator, total_weight = Split <axis = 2, num_outputs = 2> (sums)
        is_none = Squeeze(key_max_is_none, axis1)
        key_top = Squeeze(key_max, axis1)
        logit_max_sum = Add(key_top, row_max)
        logit_max = Max(logit_max_sum, lowest)
        counted_weight = Where(is_none, one_f, total_weight)
    """
    lines += text.add_eps("counted_weight", "logit_max", "denominator")
    lines += text.guarded_division(
        """
        channel_axis = Constant <value_ints = [3]> ()
        logits = Unsqueeze(logits_3d, channel_axis)
        values = Unsqueeze(value_f, channel_axis)
        bias_axes = Constant <value_ints = [2, 3]> ()
        bias_rows = Unsqueeze(band_f, bias_axes)
        """
        + windowed.exact_body(causal)
        + "exact_mean = Squeeze(exact_means, channel_axis)\n"
    )
    return lines + text.gate(gate, "query_f", "mean", "result") + text.output("result")


def _pair_body() -> str:
    """Define ``pair_blocks``, ``[B, blocks, size, 2D]``: weighted values, and then weights."""
    lines = sums.cut_of("value_f")
    lines += sums.split("logits_3d", "logit_blocks", gap="masked")
    lines += sums.split("value_f", "value_blocks")
    lines += sums.largest("logit_blocks", "key_max")
    return (
        lines
        + """
        key_shifted = Sub(logit_blocks, key_max)
        key_weight = Exp(key_shifted)
        weighted = Mul(key_weight, value_blocks)
        pair_blocks = Concat <axis = 3> (weighted, key_weight)
    """
    )


def _band_weights_body() -> str:
    """Define ``band_weight``, ``[T, W]``, and ``outside_weight`` of the keys with bias 0."""
    return """
        band_rows = Slice(band_f, zero_1d, tokens, zero_1d)
        some_max = ReduceMax <keepdims = 1> (band_rows, axis1)
        row_max = Max(some_max, zero_f)
        band_shifted = Sub(band_rows, row_max)
        some_weight = Exp(band_shifted)
        band_shape = Concat <axis = 0> (tokens, width)
        band_weight = Expand(some_weight, band_shape)
        outside_shift = Neg(row_max)
        outside_weight = Exp(outside_shift)
    """


def _diagonal_body() -> str:
    """Define ``diagonal``, ``[blocks, block, context]``: the band's weights of each block."""
    # _sums of torch_ops.aft_local explains how each row moves one column to the right.
    return """
        block = Max(width, smallest_block)
        context_plus = Add(block, width)
        context = Sub(context_plus, one_1d)
        tokens_up = Add(tokens, block)
        tokens_up_less = Sub(tokens_up, one_1d)
        blocks = Div(tokens_up_less, block)
        padded_tokens = Mul(blocks, block)
        missing = Sub(padded_tokens, tokens)
        row_pads = Concat <axis = 0> (zero_1d, zero_1d, missing, block)
        rows = Pad(band_weight, row_pads)
        infer = Constant <value_ints = [-1]> ()
        flat_shape = Concat <axis = 0> (blocks, infer)
        flat = Reshape(rows, flat_shape)
        diagonal_size = Mul(block, context)
        trimmed = Slice(flat, zero_1d, diagonal_size, axis1)
        diagonal_shape = Concat <axis = 0> (blocks, block, context)
        diagonal = Reshape(trimmed, diagonal_shape)
    """


def _inside_body() -> str:
    """Define ``inside``, ``[B, T, 2D]``: the sums of ``pair_blocks`` within each window."""
    pads = """
        overhang = Sub(context, block)
        right = Sub(overhang, left)
        context_right = Add(missing, right)
        context_pads = Concat <axis = 0> (left, context_right)
    """
    return (
        pads
        + sums.join("pair_blocks", "pair")
        + """
        pair_padded = Pad(pair, context_pads, , axis1)
        block_scalar = Squeeze(block)
        padded_scalar = Squeeze(padded_tokens)
        context_scalar = Squeeze(context)
        block_starts = Range(zero, padded_scalar, block_scalar)
        starts_2d = Unsqueeze(block_starts, axis1)
        offsets = Range(zero, context_scalar, one)
        indices = Add(starts_2d, offsets)
        contexts = Gather <axis = 1> (pair_padded, indices)
        products = MatMul(diagonal, contexts)
        joined_shape = Constant <value_ints = [0, -1]> ()
        inside_shape = Concat <axis = 0> (joined_shape, pair_width)
        inside_padded = Reshape(products, inside_shape)
        inside = Slice(inside_padded, zero_1d, tokens, axis1)
    """
    )


PAIR = Mechanism(
    op_type="AftLocal",
    stem="aft_local",
    inputs=("query", "key", "value", "band", "lengths"),
    shapes=("B T D", "B T D", "B T D", "Tmax W", "B"),
    exponents=("key", "band"),
    attributes=(GATE, DENOMINATOR_EPS),
    body=_body,
    doc=(
        "AFT-local (arXiv 2105.14103, eq. 4): query, key, value [B, T, D], band [Tmax, 2s-1], "
        "causal [Tmax, s]; band[t, j] is the bias of key t + j - (s-1), keys outside it have "
        "bias 0; a band of one row serves every position."
    ),
).register()
