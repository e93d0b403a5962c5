"""A norm and a linear layer that reads it.

    Y = LayerNorm(X) W + b

Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4.
"""

import onnx

from aftexport.operators.encoder._attributes import EPSILON, PRECISION
from aftexport.operators.schema import OnnxOperator, as_float


def _body() -> str:
    return (
        as_float("x", "norm_weight", "norm_bias", "weight", "bias")
        + """
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> (
            x_f, norm_weight_f, norm_bias_f
        )
        product = MatMul(normed, weight_f)
        result = Add(product, bias_f)
        output = CastLike(result, x)
    """
    )


LAYER_NORM_LINEAR = OnnxOperator(
    op_type="LayerNormLinear",
    inputs=("x", "norm_weight", "norm_bias", "weight", "bias"),
    shapes=("B T D", "D", "D", "D E", "E"),
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4).",
)
onnx.defs.register_schema(LAYER_NORM_LINEAR.schema())
