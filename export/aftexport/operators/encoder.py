"""Operators of the encoder around the attention: norms, products and the feed-forward network.

One more operator computes a whole Fastformer layer, whose attention commutes with its products.
PyTorch models do not call these operators; ``aftexport.lowering`` finds them in exported graphs.
"""

from collections.abc import Iterable
from enum import Enum

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators import two_level_sums as sums
from aftexport.operators.schema import NUM_HEADS, Attribute, OnnxOperator, as_float

_BFLOAT16 = 16
_FLOAT = 1


class Arithmetic(Enum):
    """The types of a body's products and sums; the statistics of a norm are in float32."""

    FLOAT32 = "float32"
    TENSORS = "tensors"
    BFLOAT16 = "bfloat16"

    def names(self, *inputs: str) -> list[str]:
        """Return the values of the body in place of its inputs."""
        return [f"{name}_f" if self is Arithmetic.FLOAT32 else name for name in inputs]

    def casts(self, inputs: Iterable[str]) -> str:
        """Return the first lines of a body, which define the values of ``names``."""
        return as_float(*inputs) if self is Arithmetic.FLOAT32 else ""

    def product(self, result: str, left: str, right: str) -> str:
        """Return the lines of a matrix product."""
        if self is not Arithmetic.BFLOAT16:
            return f"{result} = MatMul({left}, {right})\n"
        return f"""
        {result}_left = Cast <to = {_BFLOAT16}> ({left})
        {result}_right = Cast <to = {_BFLOAT16}> ({right})
        {result}_rounded = MatMul({result}_left, {result}_right)
        {result} = Cast <to = {_FLOAT}> ({result}_rounded)
        """

    def gelu(self, result: str, x: str, *, has_operator: bool = True) -> str:
        """Return the lines of the exact GELU; opsets from 20 on have an operator for it."""
        # onnx's evaluator has no Gelu within a function, and ONNX Runtime fuses the parts of one.
        if self is Arithmetic.FLOAT32:
            return _gelu_parts(result, x)
        if has_operator:
            return f"{result} = Gelu({x})\n"
        if self is Arithmetic.BFLOAT16:
            return _gelu_parts(result, x)
        return (
            f"{x}_wide = Cast <to = {_FLOAT}> ({x})\n"
            + _gelu_parts(f"{result}_wide", f"{x}_wide")
            + f"{result} = CastLike({result}_wide, {x})\n"
        )

    def output(self, name: str, expression: str) -> str:
        """Return the lines of an output, which has the type of the input ``x``."""
        if self is not Arithmetic.FLOAT32:
            return f"{name} = {expression}\n"
        return f"{name}_result = {expression}\n{name} = CastLike({name}_result, x)\n"


def layer_norm(x: str, weight: str, bias: str) -> str:
    """Return the line of the norm, ``normed``."""
    return f"""
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> ({x}, {weight}, {bias})
        """


def _gelu_parts(result: str, x: str) -> str:
    """Return the lines of the exact GELU by the error function, of an input in float32."""
    # The root has the type of the product, which is float64 where a float64 engine runs it.
    return f"""
        two_f = Constant <value_float = 2.0> ()
        two = CastLike(two_f, {x})
        sqrt_two = Sqrt(two)
        one_f = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        scaled = Div({x}, sqrt_two)
        error_function = Erf(scaled)
        twice_weight = Add(error_function, one_f)
        twice_activated = Mul({x}, twice_weight)
        {result} = Mul(twice_activated, half)
        """


_NORMED = ("x", "norm_weight", "norm_bias")
EPSILON = Attribute("epsilon", 1e-5, "Constant that is added to the variance of the norm.")
PRECISION = Attribute(
    "precision",
    "fp32",
    "Precision of the products: fp32; bf16, with operands rounded to bfloat16; int8, with weights "
    "quantized by column and activations by row. Sums are float32 or int32. The portable body "
    "computes in float32.",
)

# A norm and a linear layer that reads it.
#
#     Y = LayerNorm(X) W + b
#
# Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4.
_LINEAR_INPUTS = (*_NORMED, "weight", "bias")


def _linear_body(arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    x, norm_weight, norm_bias, weight, bias = arithmetic.names(*_LINEAR_INPUTS)
    return (
        arithmetic.casts(_LINEAR_INPUTS)
        + layer_norm(x, norm_weight, norm_bias)
        + arithmetic.product("product", "normed", weight)
        + arithmetic.output("output", f"Add(product, {bias})")
    )


LAYER_NORM_LINEAR = OnnxOperator(
    op_type="LayerNormLinear",
    inputs=_LINEAR_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E"),
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_linear_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4).",
)


# A norm and the three linear layers of an attention that read it.
#
#     N = LayerNorm(X);  query = N W_q + b_q;  key = N W_k + b_k;  value = N W_v + b_v
#
# Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4, and Vaswani et al.,
# arXiv 1706.03762, section 3.2.2. Each output is a separate tensor, as the attention needs it.
_OUTPUTS = ("query", "key", "value")
_QUERY_KEY_VALUE_INPUTS = (
    *_NORMED,
    *(f"{name}_{part}" for name in _OUTPUTS for part in ("weight", "bias")),
)


def _query_key_value_body(arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    x, norm_weight, norm_bias, *parameters = arithmetic.names(*_QUERY_KEY_VALUE_INPUTS)
    lines = arithmetic.casts(_QUERY_KEY_VALUE_INPUTS) + layer_norm(x, norm_weight, norm_bias)
    for name, weight, bias in zip(_OUTPUTS, parameters[::2], parameters[1::2], strict=True):
        lines += arithmetic.product(f"{name}_product", "normed", weight)
        lines += arithmetic.output(name, f"Add({name}_product, {bias})")
    return lines


LAYER_NORM_QUERY_KEY_VALUE = OnnxOperator(
    op_type="LayerNormQueryKeyValue",
    inputs=_QUERY_KEY_VALUE_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E", "D F", "F", "D G", "G"),
    outputs=_OUTPUTS,
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_query_key_value_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4), for query, key and value each.",
)


# The feed-forward half of a pre-norm encoder layer.
#
#     Y = X + gelu(LayerNorm(X) W_in + b_in) W_out + b_out
#
# Vaswani et al., arXiv 1706.03762, eq. 2, with the norm before it (Xiong et al.,
# arXiv 2002.04745) and the exact GELU (Hendrycks and Gimpel, arXiv 1606.08415).
_FEED_FORWARD_INPUTS = (*_NORMED, "weight_in", "bias_in", "weight_out", "bias_out")


def _feed_forward_body(
    arithmetic: Arithmetic = Arithmetic.FLOAT32, *, has_gelu: bool = True
) -> str:
    x, norm_weight, norm_bias, weight_in, bias_in, weight_out, bias_out = arithmetic.names(
        *_FEED_FORWARD_INPUTS
    )
    return (
        arithmetic.casts(_FEED_FORWARD_INPUTS)
        + layer_norm(x, norm_weight, norm_bias)
        + arithmetic.product("product_in", "normed", weight_in)
        + f"hidden = Add(product_in, {bias_in})\n"
        + arithmetic.gelu("activated", "hidden", has_operator=has_gelu)
        + arithmetic.product("product_out", "activated", weight_out)
        + f"change = Add(product_out, {bias_out})\n"
        + arithmetic.output("output", f"Add({x}, change)")
    )


LAYER_NORM_FEED_FORWARD = OnnxOperator(
    op_type="LayerNormFeedForward",
    inputs=_FEED_FORWARD_INPUTS,
    shapes=("B T D", "D", "D", "D F", "F", "F D", "D"),
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_feed_forward_body,
    doc="x + gelu(LayerNorm(x) @ weight_in + bias_in) @ weight_out + bias_out.",
)


# A linear layer and a residual that is added to its result.
#
# Y = R + X W + b
_RESIDUAL_INPUTS = ("x", "weight", "bias", "residual")


def _residual_body(arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    x, weight, bias, residual = arithmetic.names(*_RESIDUAL_INPUTS)
    return (
        arithmetic.casts(_RESIDUAL_INPUTS)
        + arithmetic.product("product", x, weight)
        + f"change = Add(product, {bias})\n"
        + arithmetic.output("output", f"Add({residual}, change)")
    )


LINEAR_RESIDUAL = OnnxOperator(
    op_type="LinearResidual",
    inputs=_RESIDUAL_INPUTS,
    shapes=("B T E", "E D", "D", "B T D"),
    exponents=(),
    attributes=(),
    kernel_attributes=(PRECISION,),
    body=_residual_body,
    doc="residual + x @ weight + bias.",
)


# The attention half of a pre-norm Fastformer layer, collapsed.
#
#     N = LayerNorm(X)
#     alpha = softmax_T(N A);               g_q[h] = (sum_t alpha[t,h] N[t]) Wq[h] + bq[h]
#     beta = softmax_T(N Wk diag(g_q) B);   g_k[h] = g_q[h] * ((sum_t beta[t,h] N[t]) Wk[h] + bk[h])
#     Y = X + N Wq (I + diag(g_k) W) + (bq * g_k) W + bq + b
#
# Wu et al., Fastformer: Additive Attention Can Be All You Need, arXiv 2108.09084, as in the
# authors' code, with ``A = Wq Wa / sqrt(d)`` and ``B = Wb / sqrt(d)`` for the logits' weights
# Wa and Wb. Pooling commutes with the linear layers, and a term that is the same for every
# token cancels in a softmax. So query, key and their products are not computed for every
# token: this takes 2 T D^2 + 8 T D H + 2 D^3 FLOPs, but the layer as written takes 6 T D^2.
def _pool(logits: str, weight: str, bias: str, result: str) -> str:
    lines = f"{logits}_masked = Where(valid_keys, {logits}, masked)\n"
    lines += sums.split(f"{logits}_masked", f"{logits}_blocks", gap="masked")
    lines += sums.softmax_weights(f"{logits}_blocks", f"{result}_weight")
    return (
        lines
        + f"""
        {result}_rows = Transpose <perm = [0, 1, 3, 2]> ({result}_weight)
        {result}_of_blocks = MatMul({result}_rows, normed_blocks)
        {result}_sums = ReduceSum <keepdims = 0> ({result}_of_blocks, axis1)
        {result}_totals = Transpose <perm = [0, 2, 1]> ({result}_weight_total)
        {result}_means = Div({result}_sums, {result}_totals)
        {result}_means_4d = Unsqueeze({result}_means, axis2)
        {result}_split = Reshape({weight}, head_shape)
        {result}_heads = Transpose <perm = [1, 0, 2]> ({result}_split)
        {result}_pooled = MatMul({result}_means_4d, {result}_heads)
        {result}_packed = Reshape({result}_pooled, row_shape)
        {result} = Add({result}_packed, {bias})
    """
    )


def _fastformer_body() -> str:
    return (
        as_float(*_FASTFORMER_INPUTS[:-1])
        + text.common_constants()
        + text.constants(row_shape=[0, 1, -1])
        + "tokens = Shape <start = 1, end = 2> (x)\n"
        + sums.sum_cut("x")
        + text.valid_keys()
        + """
        valid_keys = Unsqueeze(valid, axis2)
        num_heads = Constant <value_int: int = @num_heads> ()
        num_heads_1d = Unsqueeze(num_heads, zero)
        keep = Constant <value_ints = [0]> ()
        infer = Constant <value_ints = [-1]> ()
        head_shape = Concat <axis = 0> (keep, num_heads_1d, infer)
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> (
            x_f, norm_weight_f, norm_bias_f
        )
        alpha_logits = MatMul(normed, alpha_weight_f)
        """
        + sums.split("normed", "normed_blocks")
        + _pool("alpha_logits", "query_weight_f", "query_bias_f", "global_query")
        + """
        global_query_column = Transpose <perm = [0, 2, 1]> (global_query)
        beta_scaled = Mul(global_query_column, beta_weight_f)
        beta = MatMul(key_weight_f, beta_scaled)
        beta_logits = MatMul(normed, beta)
        """
        + _pool("beta_logits", "key_weight_f", "key_bias_f", "mean_key")
        + """
        global_key = Mul(global_query, mean_key)
        query_scaled = Mul(query_weight_f, global_key)
        query_mixed = MatMul(query_scaled, weight_f)
        document_weight = Add(query_mixed, query_weight_f)
        bias_scaled = Mul(query_bias_f, global_key)
        bias_mixed = MatMul(bias_scaled, weight_f)
        biases = Add(query_bias_f, bias_f)
        document_bias = Add(bias_mixed, biases)
        product = MatMul(normed, document_weight)
        change = Add(product, document_bias)
        result = Add(x_f, change)
        output = CastLike(result, x)
        """
    )


_FASTFORMER_INPUTS = (
    *_NORMED,
    "query_weight",
    "query_bias",
    "key_weight",
    "key_bias",
    "alpha_weight",
    "beta_weight",
    "weight",
    "bias",
    "lengths",
)

LAYER_NORM_FASTFORMER = OnnxOperator(
    op_type="LayerNormFastformer",
    inputs=_FASTFORMER_INPUTS,
    shapes=("B T D", "D", "D", "D D", "D", "D D", "D", "D H", "D H", "D D", "D", "B"),
    exponents=("alpha_weight", "beta_weight"),
    attributes=(EPSILON, NUM_HEADS),
    kernel_attributes=(PRECISION,),
    body=_fastformer_body,
    doc=(
        "x + Fastformer's layer (arXiv 2108.09084) of LayerNorm(x), with alpha_weight = "
        "query_weight @ Wa / sqrt(d) and beta_weight = Wb / sqrt(d)."
    ),
)


ARITHMETIC_OPERATORS: dict[str, OnnxOperator] = {
    operator.op_type: operator
    for operator in (
        LAYER_NORM_LINEAR,
        LAYER_NORM_QUERY_KEY_VALUE,
        LAYER_NORM_FEED_FORWARD,
        LINEAR_RESIDUAL,
    )
}
"""The operators whose bodies have every form of ``Arithmetic``, by ONNX name."""
OPERATORS: dict[str, OnnxOperator] = {
    **ARITHMETIC_OPERATORS,
    LAYER_NORM_FASTFORMER.op_type: LAYER_NORM_FASTFORMER,
}
"""The encoder's operators by ONNX name."""
for _operator in OPERATORS.values():
    onnx.defs.register_schema(_operator.schema())
