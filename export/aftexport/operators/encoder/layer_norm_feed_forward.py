"""The feed-forward half of a pre-norm encoder layer.

    Y = X + gelu(LayerNorm(X) W_in + b_in) W_out + b_out

Vaswani et al., arXiv 1706.03762, eq. 2, with the norm before it (Xiong et al.,
arXiv 2002.04745) and the exact GELU (Hendrycks and Gimpel, arXiv 1606.08415).
"""

import onnx

from aftexport.operators.encoder._attributes import EPSILON, PRECISION
from aftexport.operators.schema import OnnxOperator, as_float


def _body() -> str:
    # onnx's evaluator has no Gelu within a function, and ONNX Runtime fuses the parts of one.
    # The root has the type of the product, which is float64 where a float64 engine runs the body.
    names = ("norm_weight", "norm_bias", "weight_in", "bias_in", "weight_out", "bias_out")
    return (
        as_float("x", *names)
        + """
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> (
            x_f, norm_weight_f, norm_bias_f
        )
        product_in = MatMul(normed, weight_in_f)
        hidden = Add(product_in, bias_in_f)
        two_f = Constant <value_float = 2.0> ()
        two = CastLike(two_f, hidden)
        sqrt_two = Sqrt(two)
        one_f = Constant <value_float = 1.0> ()
        half = Constant <value_float = 0.5> ()
        scaled = Div(hidden, sqrt_two)
        error_function = Erf(scaled)
        twice_weight = Add(error_function, one_f)
        twice_activated = Mul(hidden, twice_weight)
        activated = Mul(twice_activated, half)
        product_out = MatMul(activated, weight_out_f)
        change = Add(product_out, bias_out_f)
        result = Add(x_f, change)
        output = CastLike(result, x)
    """
    )


LAYER_NORM_FEED_FORWARD = OnnxOperator(
    op_type="LayerNormFeedForward",
    inputs=(
        "x",
        "norm_weight",
        "norm_bias",
        "weight_in",
        "bias_in",
        "weight_out",
        "bias_out",
    ),
    shapes=("B T D", "D", "D", "D F", "F", "F D", "D"),
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="x + gelu(LayerNorm(x) @ weight_in + bias_in) @ weight_out + bias_out.",
)
onnx.defs.register_schema(LAYER_NORM_FEED_FORWARD.schema())
