"""AFT-full: a learned bias for every pair of positions.

    Y[t] = gate(Q[t]) * sum_u exp(K[u] + w[t,u]) V[u] / (sum_u exp(K[u] + w[t,u]) + eps)

Zhai et al., An Attention Free Transformer, arXiv 2105.14103, eq. 2; eps is 0 there. The time is
quadratic in the tokens; no tensor of T x T x D is allocated.

Around a matrix product of the runtime, an operator before it and one after it take its place;
``engines.aft_full_product`` puts them into graphs, and no PyTorch model calls them:

    entries = (exp(K - m) V, exp(K - m)),  m the largest key of each channel
    products = exp(w - r) entries,         r the largest bias of each row; a standard MatMul
    Y = gate(Q) * the ratio of the two halves of the products
"""

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.schema import DENOMINATOR_EPS, GATE, Attribute, Mechanism, OnnxOperator

_PRECISION = Attribute(
    "precision",
    "fp32",
    "Precision of the products: fp32; or fp16, bf16 or int8, with exp(w) and the keys' terms "
    "rounded to float16, bfloat16 or 8-bit integers. Sums are float32. The fallback computes "
    "in float32, and so does the CPU kernel for fp16. int8 means bf16 on a GPU, in the causal "
    "form, and for a position_bias that spans more than 1 in a row.",
)


def _body(*, gate: str, causal: bool) -> str:
    lines = text.inputs_as_float("query", "key", "value", "position_bias") + text.log_eps()
    lines += text.mask("key_f", "logits", rank=3)
    if causal:
        lines += """
            bias_shape = Shape(position_bias_f)
            ones = ConstantOfShape <value = float[1] {1.0}> (bias_shape)
            lower = Trilu <upper = 0> (ones)
            causal = Cast <to = 9> (lower)
            bias = Where(causal, position_bias_f, masked)
        """
    else:
        lines += "bias = Identity(position_bias_f)\n"
    lines += bias_corner()
    lines += """
        bias_row_max = ReduceMax <keepdims = 1> (bias, axis1)
        bias_max = Max(bias_row_max, lowest)
        bias_shifted = Sub(bias, bias_max)
        all_bias_weight = Exp(bias_shifted)
        bias_weight = Slice(all_bias_weight, origin, corner, both_axes)
    """
    lines += text.weighted_pair("value_f", axis=2)
    lines += """
        sums = MatMul(bias_weight, pair)
        numerator, total_weight = Split <axis = 2, num_outputs = 2> (sums)
        bias_max_rows = Slice(bias_max, zero_1d, tokens, zero_1d)
        logit_max_sum = Add(key_max, bias_max_rows)
        logit_max = Max(logit_max_sum, lowest)
        counted_weight = Where(key_max_is_none, one_f, total_weight)
    """
    lines += text.add_eps("counted_weight", "logit_max", "denominator")
    lines += text.guarded_division(exact_body())
    return lines + text.gate(gate, "query_f", "mean", "result") + text.output("result")


def bias_corner() -> str:
    """Define ``origin``, ``corner`` and ``both_axes``, which cut a bias to the tokens."""
    return """
        corner = Concat <axis = 0> (tokens, tokens)
        both_axes = Constant <value_ints = [0, 1]> ()
        origin = Constant <value_ints = [0, 0]> ()
    """


def exact_body() -> str:
    """Define ``exact_mean``, row by row: a softmax of keys plus that row's biases."""
    # Reads logits, bias, value_f, log_eps and the names of bias_corner.
    lines = text.constants(half=0.5, half_lowest=text.LOWEST / 2)
    lines += """
        half_key = Mul(logits, half)
        bias_corner = Slice(bias, origin, corner, both_axes)
        half_bias = Mul(bias_corner, half)
    """
    lines += sums.cut_of("logits")
    lines += sums.split("value_f", "value_blocks")
    step = """
        bias_row = Gather <axis = 0> (half_bias, row_index)
        row = Unsqueeze(bias_row, axis1)
        half_logit = Add(half_key, row)
    """
    step += text.largest_pair("half_logit", "half_key", "row", "best")
    step += """
        best_key_kept = Max(best_key, half_lowest)
        best_bias_kept = Max(best_bias, half_lowest)
        key_part = Sub(half_key, best_key_kept)
        bias_part = Sub(row, best_bias_kept)
        half_relative = Add(key_part, bias_part)
        relative = Add(half_relative, half_relative)
    """
    step += sums.split("relative", "biased", gap="masked")
    step += sums.softmax_weights("biased", "weight")
    step += """
        half_top = Add(best_key_kept, best_bias_kept)
        top_sum = Add(half_top, half_top)
        top = Max(top_sum, lowest)
    """
    step += text.add_eps("weight_total", "top", "weight_divisor")
    step += "weighted_values = Mul(weight, value_blocks)\n"
    step += sums.total("weighted_values", "row_sum")
    step += """
        row_mean_kept = Div(row_sum, weight_divisor)
        row_mean = Squeeze(row_mean_kept, axis1)
    """
    lines += text.loop(
        step, count="end", index="row_index", states={}, ranks={"row_mean": 2}, output="row_mean"
    )
    return (
        lines
        + """
        rows_shape = Concat <axis = 0> (tokens, sum_batch, value_blocks_width)
        rows = Reshape(row_mean_stack, rows_shape)
        exact_mean = Transpose <perm = [1, 0, 2]> (rows)
    """
    )


PAIR = Mechanism(
    op_type="AftFull",
    stem="aft_full",
    inputs=("query", "key", "value", "position_bias", "lengths"),
    shapes=("B T D", "B T D", "B T D", "Tmax Tmax", "B"),
    exponents=("key", "position_bias"),
    attributes=(GATE, DENOMINATOR_EPS),
    kernel_attributes=(_PRECISION,),
    body=_body,
    doc=(
        "AFT-full (arXiv 2105.14103, eq. 2): query, key, value [B, T, D], "
        "position_bias [Tmax, Tmax] with T <= Tmax."
    ),
).register()


def _prepare_body() -> str:
    lines = text.inputs_as_float("key", "value", sequence="key")
    lines += text.mask("key_f", "logits", rank=3)
    lines += text.weighted_pair("value_f", axis=2)
    return lines + "entries = CastLike(pair, key)\n"


def _finish_body(*, gate: str) -> str:
    """Divide, or compute by the definition if a product is infinite or too small."""
    lines = text.inputs_as_float("query", "key", "value", "position_bias", "products")
    lines += text.mask("key_f", "logits", rank=3)
    lines += bias_corner()
    lines += "key_max_of_all = ReduceMax <keepdims = 1> (logits, axis1)\n"
    lines += text.finite_maximum("key_max_of_all", "key_max")
    lines += """
        bias = Identity(position_bias_f)
        log_eps = Identity(masked)
        numerator, total_weight = Split <axis = 2, num_outputs = 2> (products_f)
        counted_weight = Where(key_max_is_none, one_f, total_weight)
        numerator_size = Abs(numerator)
        largest_product = Max(numerator_size, counted_weight)
        overflows = IsInf(largest_product)
        denominator = Where(overflows, zero_f, counted_weight)
    """
    lines += text.guarded_division(exact_body())
    return lines + text.gate(gate, "query_f", "mean", "result") + text.output("result")


AFT_FULL_PREPARE = OnnxOperator(
    op_type="AftFullPrepare",
    inputs=("key", "value", "lengths"),
    shapes=("B T D", "B T D", "B"),
    outputs=("entries",),
    exponents=("key",),
    attributes=(),
    body=_prepare_body,
    doc=(
        "The right side of AFT-full's product, [B, T, 2 D]: exp(key - m) value and exp(key - m), "
        "m the largest key of the channel; 0 for padded keys."
    ),
)
AFT_FULL_FINISH = OnnxOperator(
    op_type="AftFullFinish",
    inputs=("query", "key", "value", "position_bias", "products", "lengths"),
    shapes=("B T D", "B T D", "B T D", "Tmax Tmax", "B T E", "B"),
    exponents=("key", "position_bias"),
    attributes=(GATE,),
    body=_finish_body,
    doc=(
        "AFT-full from products [B, T, 2 D] = exp(position_bias - its row maxima) @ entries. "
        "Outputs of products that lost digits are computed by the definition, from key, value and "
        "position_bias."
    ),
    sizes=lambda _: {"D": 8, "E": 16},
    nonnegative=lambda _: {"products": 8},
)
for _operator in (AFT_FULL_PREPARE, AFT_FULL_FINISH):
    onnx.defs.register_schema(_operator.schema())
