"""Operators of the encoder around the attention: norms, products and the feed-forward network.

One more operator computes a whole Fastformer layer, whose attention commutes with its products.
PyTorch models do not call these operators; ``aftexport.lowering`` finds them in exported graphs.
"""

from collections.abc import Callable, Collection, Sequence
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

    def operand(self, name: str) -> str:
        """Return the value of the body in place of an input."""
        return f"{name}_f" if self is Arithmetic.FLOAT32 else name

    def casts(self, inputs: Sequence[str]) -> str:
        """Return the first lines of a body, which define the values of ``operand``."""
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

    def linear(self, result: str, left: str, layer: str, present: Collection[str]) -> str:
        """Return the lines of a linear layer with the inputs of ``layer_inputs``."""
        weight, bias = layer_inputs(layer)
        if bias not in present:
            return self.product(result, left, self.operand(weight))
        product = self.product(f"{result}_product", left, self.operand(weight))
        return f"{product}{result} = Add({result}_product, {self.operand(bias)})\n"

    def activation(self, function: str, result: str, x: str, *, has_gelu: bool) -> str:
        """Return the lines of an activation; opsets from 20 on have an operator Gelu."""
        # onnx's evaluator has no Gelu within a function, and ONNX Runtime fuses the parts of one.
        if not function.startswith("gelu"):
            return _ACTIVATION_PARTS[function](result, x)
        if has_gelu and self is not Arithmetic.FLOAT32:
            approximate = "tanh" if function == "gelu_tanh" else "none"
            return f'{result} = Gelu <approximate = "{approximate}"> ({x})\n'
        parts = _ACTIVATION_PARTS[function]
        if self is not Arithmetic.TENSORS:
            return parts(result, x)
        return (
            f"{x}_wide = Cast <to = {_FLOAT}> ({x})\n"
            + parts(f"{result}_wide", f"{x}_wide")
            + f"{result} = CastLike({result}_wide, {x})\n"
        )

    def normed(self, norm: str, present: Collection[str]) -> tuple[str, str]:
        """Return the lines of the norm, and the name of its result; without one, that of x."""
        x = self.operand("x")
        if "norm_weight" not in present:
            return "", x
        weight = self.operand("norm_weight")
        bias = [self.operand("norm_bias")] if "norm_bias" in present else []
        if norm == "layer":
            operands = ", ".join([x, weight, *bias])
            settings = "<axis = -1, epsilon: float = @epsilon>"
            return f"normed = LayerNormalization {settings} ({operands})\n", "normed"
        return _rms_norm(x, weight, bias), "normed"

    def output(self, name: str, value: str) -> str:
        """Return the line of an output, which has the type of the input ``x``."""
        operation = f"CastLike({value}, x)" if self is Arithmetic.FLOAT32 else f"Identity({value})"
        return f"{name} = {operation}\n"


def layer_inputs(layer: str) -> tuple[str, str]:
    """Return the names of weight and bias: of the layer ``in``, ``weight_in`` and ``bias_in``."""
    return (f"weight_{layer}", f"bias_{layer}") if layer else ("weight", "bias")


def _rms_norm(x: str, weight: str, bias: Sequence[str]) -> str:
    """Return the lines of an RMS norm, whose mean square is in float32."""
    result = "weighted" if bias else "normed"
    lines = f"""
        wide = Cast <to = {_FLOAT}> ({x})
        squares = Mul(wide, wide)
        channels = Constant <value_ints = [-1]> ()
        mean_square = ReduceMean <keepdims = 1> (squares, channels)
        epsilon = Constant <value_float: float = @epsilon> ()
        shifted_mean = Add(mean_square, epsilon)
        root = Sqrt(shifted_mean)
        unit_wide = Div(wide, root)
        unit = CastLike(unit_wide, {weight})
        {result} = Mul(unit, {weight})
        """
    return lines + "".join(f"normed = Add(weighted, {name})\n" for name in bias)


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


def _gelu_tanh_parts(result: str, x: str) -> str:
    """Return the lines of the GELU by the hyperbolic tangent, of an input in float32."""
    return f"""
        inner_factor = Constant <value_float = 0.7978845608028654> ()
        cube_factor = Constant <value_float = 0.044715> ()
        one_f = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        square = Mul({x}, {x})
        cube = Mul(square, {x})
        cube_part = Mul(cube, cube_factor)
        inner_sum = Add({x}, cube_part)
        inner = Mul(inner_sum, inner_factor)
        hyperbolic = Tanh(inner)
        twice_weight = Add(hyperbolic, one_f)
        twice_activated = Mul({x}, twice_weight)
        {result} = Mul(twice_activated, half)
        """


_ACTIVATION_PARTS: dict[str, Callable[[str, str], str]] = {
    "gelu": _gelu_parts,
    "gelu_tanh": _gelu_tanh_parts,
    "relu": lambda result, x: f"{result} = Relu({x})\n",
    "silu": lambda result, x: f"{x}_gate = Sigmoid({x})\n{result} = Mul({x}, {x}_gate)\n",
}

_NORMED = ("x", "norm_weight", "norm_bias")
_NORM_PARAMETERS = ("norm_weight", "norm_bias")
NORM = Attribute(
    "norm",
    "layer",
    "The norm: layer, or rms, which divides by the root of the mean square. Without norm_weight "
    "there is none.",
    ("layer", "rms"),
)
ACTIVATION = Attribute(
    "activation",
    "gelu",
    "Activation of the hidden layer; gelu_tanh is the form with the hyperbolic tangent.",
    ("gelu", "gelu_tanh", "relu", "silu"),
)
EPSILON = Attribute(
    "epsilon", 1e-5, "Constant that is added to the variance or the mean square of the norm."
)
PRECISION = Attribute(
    "precision",
    "fp32",
    "Precision of the products: fp32; bf16, with operands rounded to bfloat16; int8, with weights "
    "quantized by column and activations by row. Sums are float32 or int32. The fallback "
    "computes in float32.",
)

_LIBRARIES = ("onnxruntime",)

# A norm and a linear layer that reads it.
#
#     Y = norm(X) W + b
#
# Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4; Zhang and Sennrich, Root Mean Square
# Layer Normalization, arXiv 1910.07467, eq. 4. Norm and bias may be absent, here and below: a layer
# after the sublayer's norm (post-norm), whose result has other readers, has none.
_LINEAR_INPUTS = (*_NORMED, *layer_inputs(""))


def _linear_body(
    *, norm: str, present: Collection[str], arithmetic: Arithmetic = Arithmetic.FLOAT32
) -> str:
    lines, normed = arithmetic.normed(norm, present)
    return (
        arithmetic.casts(LAYER_NORM_LINEAR.given(present))
        + lines
        + arithmetic.linear("sum", normed, "", present)
        + arithmetic.output("output", "sum")
    )


LAYER_NORM_LINEAR = OnnxOperator(
    op_type="LayerNormLinear",
    inputs=_LINEAR_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E"),
    optional=(*_NORM_PARAMETERS, "bias"),
    exponents=(),
    libraries=_LIBRARIES,
    attributes=(EPSILON, NORM),
    kernel_attributes=(PRECISION,),
    body=_linear_body,
    doc=(
        "norm(x) @ weight + bias, with a layer norm (arXiv 1607.06450, eq. 4), an RMS norm "
        "(arXiv 1910.07467, eq. 4) or none."
    ),
)


# A norm and the three linear layers of an attention that read it.
#
#     N = norm(X);  query = N W_q + b_q;  key = N W_k + b_k;  value = N W_v + b_v
#
# Vaswani et al., arXiv 1706.03762, section 3.2.2. Each output is a separate tensor, as the
# attention needs it.
_OUTPUTS = ("query", "key", "value")
_BIASES = tuple(f"{name}_bias" for name in _OUTPUTS)
_QUERY_KEY_VALUE_INPUTS = (
    *_NORMED,
    *(f"{name}_{part}" for name in _OUTPUTS for part in ("weight", "bias")),
)


def _query_key_value_body(
    *, norm: str, present: Collection[str], arithmetic: Arithmetic = Arithmetic.FLOAT32
) -> str:
    normed_lines, normed = arithmetic.normed(norm, present)
    lines = arithmetic.casts(LAYER_NORM_QUERY_KEY_VALUE.given(present)) + normed_lines
    for name in _OUTPUTS:
        result = f"{name}_product"
        lines += arithmetic.product(result, normed, arithmetic.operand(f"{name}_weight"))
        if f"{name}_bias" in present:
            lines += f"{name}_sum = Add({result}, {arithmetic.operand(f'{name}_bias')})\n"
            result = f"{name}_sum"
        lines += arithmetic.output(name, result)
    return lines


LAYER_NORM_QUERY_KEY_VALUE = OnnxOperator(
    op_type="LayerNormQueryKeyValue",
    inputs=_QUERY_KEY_VALUE_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E", "D F", "F", "D G", "G"),
    optional=(*_NORM_PARAMETERS, *_BIASES),
    outputs=_OUTPUTS,
    exponents=(),
    libraries=_LIBRARIES,
    attributes=(EPSILON, NORM),
    kernel_attributes=(PRECISION,),
    body=_query_key_value_body,
    doc="norm(x) @ weight + bias as in LayerNormLinear, for query, key and value each.",
)


# The feed-forward half of an encoder layer.
#
#     H = f(norm(X) W_in + b_in), or gated H = f(norm(X) W_in + b_in) (norm(X) W_up + b_up)
#     Y = X + H W_out + b_out
#
# Vaswani et al., arXiv 1706.03762, eq. 2, with the norm before it (Xiong et al., arXiv 2002.04745)
# or none, and the exact GELU (Hendrycks and Gimpel, arXiv 1606.08415), its form with the hyperbolic
# tangent, SiLU or ReLU. Gated: Shazeer, arXiv 2002.05202, eq. 6.
_FEED_FORWARD_INPUTS = (
    *_NORMED,
    *(name for layer in ("in", "out", "up") for name in layer_inputs(layer)),
)


def _feed_forward_body(
    *,
    norm: str,
    activation: str,
    present: Collection[str],
    arithmetic: Arithmetic = Arithmetic.FLOAT32,
    has_gelu: bool = True,
) -> str:
    normed_lines, normed = arithmetic.normed(norm, present)
    hidden, gate = "activated", ""
    if "weight_up" in present:
        hidden = "gated"
        gate = arithmetic.linear("up", normed, "up", present) + "gated = Mul(activated, up)\n"
    return (
        arithmetic.casts(LAYER_NORM_FEED_FORWARD.given(present))
        + normed_lines
        + arithmetic.linear("hidden", normed, "in", present)
        + arithmetic.activation(activation, "activated", "hidden", has_gelu=has_gelu)
        + gate
        + arithmetic.linear("change", hidden, "out", present)
        + f"sum = Add({arithmetic.operand('x')}, change)\n"
        + arithmetic.output("output", "sum")
    )


LAYER_NORM_FEED_FORWARD = OnnxOperator(
    op_type="LayerNormFeedForward",
    inputs=_FEED_FORWARD_INPUTS,
    shapes=("B T D", "D", "D", "D F", "F", "F D", "D", "D F", "F"),
    optional=(*_NORM_PARAMETERS, "bias_in", "bias_out", "weight_up", "bias_up"),
    exponents=(),
    libraries=_LIBRARIES,
    attributes=(EPSILON, NORM, ACTIVATION),
    kernel_attributes=(PRECISION,),
    body=_feed_forward_body,
    doc=(
        "x + hidden @ weight_out + bias_out, where hidden is "
        "activation(norm(x) @ weight_in + bias_in), times norm(x) @ weight_up + bias_up if there "
        "is a weight_up (arXiv 2002.05202, eq. 6)."
    ),
)


# A linear layer and a residual that is added to its result.
#
# Y = R + X W + b
_RESIDUAL_INPUTS = ("x", "weight", "bias", "residual")


def _residual_body(*, present: Collection[str], arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    return (
        arithmetic.casts(LINEAR_RESIDUAL.given(present))
        + arithmetic.linear("change", arithmetic.operand("x"), "", present)
        + f"sum = Add({arithmetic.operand('residual')}, change)\n"
        + arithmetic.output("output", "sum")
    )


LINEAR_RESIDUAL = OnnxOperator(
    op_type="LinearResidual",
    inputs=_RESIDUAL_INPUTS,
    shapes=("B T E", "E D", "D", "B T D"),
    optional=("bias",),
    exponents=(),
    libraries=_LIBRARIES,
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
        + sums.cut_of("x")
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
