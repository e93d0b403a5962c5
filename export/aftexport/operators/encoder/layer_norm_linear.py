"""A norm and a linear layer that reads it.

    Y = LayerNorm(X) W + b

Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4.
"""

import onnx

from aftexport.operators.encoder.arithmetic import EPSILON, PRECISION, Arithmetic, layer_norm
from aftexport.operators.schema import OnnxOperator

_INPUTS = ("x", "norm_weight", "norm_bias", "weight", "bias")


def _body(arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    x, norm_weight, norm_bias, weight, bias = arithmetic.names(*_INPUTS)
    return (
        arithmetic.casts(_INPUTS)
        + layer_norm(x, norm_weight, norm_bias)
        + arithmetic.product("product", "normed", weight)
        + arithmetic.output("output", f"Add(product, {bias})")
    )


LAYER_NORM_LINEAR = OnnxOperator(
    op_type="LayerNormLinear",
    inputs=_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E"),
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4).",
)
onnx.defs.register_schema(LAYER_NORM_LINEAR.schema())
