"""A linear layer and a residual that is added to its result.

Y = R + X W + b
"""

import onnx

from aftexport.operators.encoder._attributes import PRECISION
from aftexport.operators.schema import OnnxOperator, as_float


def _body() -> str:
    return (
        as_float("x", "weight", "bias", "residual")
        + """
        product = MatMul(x_f, weight_f)
        change = Add(product, bias_f)
        result = Add(residual_f, change)
        output = CastLike(result, x)
    """
    )


LINEAR_RESIDUAL = OnnxOperator(
    op_type="LinearResidual",
    inputs=("x", "weight", "bias", "residual"),
    shapes=("B T E", "E D", "D", "B T D"),
    exponents=(),
    attributes=(),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="residual + x @ weight + bias.",
)
onnx.defs.register_schema(LINEAR_RESIDUAL.schema())
