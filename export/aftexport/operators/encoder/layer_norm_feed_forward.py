"""The feed-forward half of a pre-norm encoder layer.

    Y = X + gelu(LayerNorm(X) W_in + b_in) W_out + b_out

Vaswani et al., arXiv 1706.03762, eq. 2, with the norm before it (Xiong et al.,
arXiv 2002.04745) and the exact GELU (Hendrycks and Gimpel, arXiv 1606.08415).
"""

import onnx

from aftexport.operators.encoder.arithmetic import EPSILON, PRECISION, Arithmetic, layer_norm
from aftexport.operators.schema import OnnxOperator

_INPUTS = (
    "x",
    "norm_weight",
    "norm_bias",
    "weight_in",
    "bias_in",
    "weight_out",
    "bias_out",
)


def _body(arithmetic: Arithmetic = Arithmetic.FLOAT32, *, has_gelu: bool = True) -> str:
    x, norm_weight, norm_bias, weight_in, bias_in, weight_out, bias_out = arithmetic.names(*_INPUTS)
    return (
        arithmetic.casts(_INPUTS)
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
    inputs=_INPUTS,
    shapes=("B T D", "D", "D", "D F", "F", "F D", "D"),
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="x + gelu(LayerNorm(x) @ weight_in + bias_in) @ weight_out + bias_out.",
)
onnx.defs.register_schema(LAYER_NORM_FEED_FORWARD.schema())
