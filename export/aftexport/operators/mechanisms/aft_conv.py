"""AFT-conv: a separate bias for each head that depends only on the distance.

    num[t] = sum_j exp(w[h,j] + K[u,h]) V[u] + sum_{u outside} exp(K[u,h]) V[u],  u = t + j - offset
    den[t] = the same without V;  Y[t] = gate(Q[t]) * num[t] / (den[t] + eps)

Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 6; eps is 0 there. One key
channel per head. The channels of a head share the filter, with "same" padding and
cross-correlation as in deep learning. The paper writes the sums as a convolution
with exp(w) - 1 plus a sum over all keys, which is subject to cancellation; see
``_windowed``.
"""

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.mechanisms import _windowed as windowed
from aftexport.operators.schema import DENOMINATOR_EPS, GATE, NUM_HEADS, Mechanism


def _body(*, gate: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value", "filter") + text.head_shape()
    lines += text.log_eps()
    lines += text.mask("key_f", "logits_3d", rank=3) + text.heads("value_f", "values")
    lines += text.constants(channel_axis=[3], two_1d=[2])
    lines += """
        width = Shape <start = 1, end = 2> (filter_f)
        span = Sub(width, one_1d)
    """
    lines += "left = Identity(span)\n" if causal else "left = Div(span, two_1d)\n"
    lines += _pair_body() + _filter_weights_body() + _inside_body()
    lines += sums.cut_of("pair") + sums.split("pair", "pair_blocks")
    lines += windowed.outside_body(causal)
    lines += """
        outside_weighted = Mul(outside_weight, outside)
        sums = Add(inside, outside_weighted)
        sums_end = Constant <value_ints = [-1]> ()
        numerator = Slice(sums, zero_1d, sums_end, channel_axis)
        far = Constant <value_ints = [9223372036854775807]> ()
        total_weight = Slice(sums, sums_end, far, channel_axis)
        logit_max_sum = Add(key_max, filter_max)
        logit_max = Max(logit_max_sum, lowest)
        counted_weight = Where(key_max_is_none, one_f, total_weight)
    """
    lines += text.add_eps("counted_weight", "logit_max", "denominator")
    lines += text.guarded_division(
        """
        filter_columns = Transpose <perm = [1, 0]> (filter_f)
        bias_axes = Constant <value_ints = [0, 3]> ()
        bias_rows = Unsqueeze(filter_columns, bias_axes)
        """
        + windowed.exact_body(causal)
        + "exact_mean = Identity(exact_means)\n"
    )
    lines += "mean_packed = Reshape(mean, packed_shape)\n"
    return lines + text.gate(gate, "query_f", "mean_packed", "result") + text.output("result")


def _pair_body() -> str:
    """Define ``logits`` and ``pair``, ``[B, T, H, e + 1]``: weighted values, and the weight."""
    lines = "logits = Unsqueeze(logits_3d, channel_axis)\n"
    return lines + text.weighted_pair("values", axis=3)


def _filter_weights_body() -> str:
    """Define ``taps``, ``[H, 1, s]``, and ``outside_weight`` of the keys with bias 0."""
    return """
        some_max = ReduceMax <keepdims = 1> (filter_f, axis1)
        filter_max = Max(some_max, zero_f)
        filter_shifted = Sub(filter_f, filter_max)
        filter_weight = Exp(filter_shifted)
        taps = Unsqueeze(filter_weight, axis1)
        outside_shift = Neg(filter_max)
        outside_weight = Exp(outside_shift)
    """


def _inside_body() -> str:
    """Define ``inside``, ``[B, T, H, e + 1]``: the sums of ``pair`` within each window."""
    return """
        columns = Transpose <perm = [0, 3, 2, 1]> (pair)
        infer_1d = Constant <value_ints = [-1]> ()
        rows_shape = Concat <axis = 0> (infer_1d, num_heads_1d, tokens)
        rows = Reshape(columns, rows_shape)
        right = Sub(span, left)
        row_pads = Concat <axis = 0> (left, right)
        row_axis = Constant <value_ints = [2]> ()
        rows_padded = Pad(rows, row_pads, , row_axis)
        convolved = Conv <group: int = @num_heads> (rows_padded, taps)
        columns_shape = Shape(columns)
        convolved_columns = Reshape(convolved, columns_shape)
        inside = Transpose <perm = [0, 3, 2, 1]> (convolved_columns)
    """


PAIR = Mechanism(
    op_type="AftConv",
    stem="aft_conv",
    inputs=("query", "key", "value", "filter", "lengths"),
    shapes=("B T D", "B T H", "B T D", "H s", "B"),
    exponents=("key", "filter"),
    attributes=(NUM_HEADS, GATE, DENOMINATOR_EPS),
    body=_body,
    doc=(
        "AFT-conv (arXiv 2105.14103, eq. 6): query, value [B, T, D], key [B, T, num_heads], "
        "filter [num_heads, s]; filter[h, j] is the bias of key t + j - (s-1)//2, "
        "causal t + j - (s-1); other keys have bias 0."
    ),
).register()
