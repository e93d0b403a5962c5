"""A norm and a linear layer that reads it.

    Y = LayerNorm(X) W + b

Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4.
"""

import onnx
import torch
from torch import Tensor

from aftexport.operators.encoder._attributes import EPSILON, PRECISION
from aftexport.operators.schema import OnnxOperator, as_float


def reference(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    epsilon: float,
) -> Tensor:
    """Compute the definition.

    Args:
        x: ``[B, T, D]``.
        norm_weight, norm_bias: ``[D]``.
        weight: ``[D, E]``.
        bias: ``[E]``.
        epsilon: the constant that is added to the variance.
    """
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)
    return normed @ weight + bias


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
    reference=reference,
    body=_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4).",
)
onnx.defs.register_schema(LAYER_NORM_LINEAR.schema())
