"""A linear layer and a residual that is added to its result.

Y = R + X W + b
"""

import onnx

from aftexport.operators.encoder.arithmetic import PRECISION, Arithmetic
from aftexport.operators.schema import OnnxOperator

_INPUTS = ("x", "weight", "bias", "residual")


def _body(arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    x, weight, bias, residual = arithmetic.names(*_INPUTS)
    return (
        arithmetic.casts(_INPUTS)
        + arithmetic.product("product", x, weight)
        + f"change = Add(product, {bias})\n"
        + arithmetic.output("output", f"Add({residual}, change)")
    )


LINEAR_RESIDUAL = OnnxOperator(
    op_type="LinearResidual",
    inputs=_INPUTS,
    shapes=("B T E", "E D", "D", "B T D"),
    exponents=(),
    attributes=(),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="residual + x @ weight + bias.",
)
onnx.defs.register_schema(LINEAR_RESIDUAL.schema())
