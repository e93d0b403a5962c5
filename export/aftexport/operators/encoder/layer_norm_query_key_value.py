"""A norm and the three linear layers of an attention that read it.

    N = LayerNorm(X);  query = N W_q + b_q;  key = N W_k + b_k;  value = N W_v + b_v

Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4, and Vaswani et al.,
arXiv 1706.03762, section 3.2.2. Each output is a separate tensor, as the attention needs it.
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
    query_weight: Tensor,
    query_bias: Tensor,
    key_weight: Tensor,
    key_bias: Tensor,
    value_weight: Tensor,
    value_bias: Tensor,
    *,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the definition.

    Args:
        x: ``[B, T, D]``.
        norm_weight, norm_bias: ``[D]``.
        query_weight, key_weight, value_weight: ``[D, E]``, ``[D, F]``, ``[D, G]``.
        query_bias, key_bias, value_bias: ``[E]``, ``[F]``, ``[G]``.
        epsilon: the constant that is added to the variance.

    Returns:
        query ``[B, T, E]``, key ``[B, T, F]`` and value ``[B, T, G]``.
    """
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, epsilon)
    return (
        normed @ query_weight + query_bias,
        normed @ key_weight + key_bias,
        normed @ value_weight + value_bias,
    )


_OUTPUTS = ("query", "key", "value")
_INPUTS = (
    "x",
    "norm_weight",
    "norm_bias",
    "query_weight",
    "query_bias",
    "key_weight",
    "key_bias",
    "value_weight",
    "value_bias",
)


def _body() -> str:
    products = (
        f"""
        {name}_product = MatMul(normed, {name}_weight_f)
        {name}_result = Add({name}_product, {name}_bias_f)
        {name} = CastLike({name}_result, x)
        """
        for name in _OUTPUTS
    )
    return (
        as_float(*_INPUTS)
        + """
        normed = LayerNormalization <axis = -1, epsilon: float = @epsilon> (
            x_f, norm_weight_f, norm_bias_f
        )
        """
        + "".join(products)
    )


LAYER_NORM_QUERY_KEY_VALUE = OnnxOperator(
    op_type="LayerNormQueryKeyValue",
    inputs=_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E", "D F", "F", "D G", "G"),
    outputs=_OUTPUTS,
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    reference=reference,
    body=_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4), for query, key and value each.",
)
onnx.defs.register_schema(LAYER_NORM_QUERY_KEY_VALUE.schema())
