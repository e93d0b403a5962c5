"""A norm and the three linear layers of an attention that read it.

    N = LayerNorm(X);  query = N W_q + b_q;  key = N W_k + b_k;  value = N W_v + b_v

Ba et al., Layer Normalization, arXiv 1607.06450, eq. 4, and Vaswani et al.,
arXiv 1706.03762, section 3.2.2. Each output is a separate tensor, as the attention needs it.
"""

import onnx

from aftexport.operators.encoder.arithmetic import EPSILON, PRECISION, Arithmetic, layer_norm
from aftexport.operators.schema import OnnxOperator

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


def _body(arithmetic: Arithmetic = Arithmetic.FLOAT32) -> str:
    x, norm_weight, norm_bias, *parameters = arithmetic.names(*_INPUTS)
    lines = arithmetic.casts(_INPUTS) + layer_norm(x, norm_weight, norm_bias)
    for name, weight, bias in zip(_OUTPUTS, parameters[::2], parameters[1::2], strict=True):
        lines += arithmetic.product(f"{name}_product", "normed", weight)
        lines += arithmetic.output(name, f"Add({name}_product, {bias})")
    return lines


LAYER_NORM_QUERY_KEY_VALUE = OnnxOperator(
    op_type="LayerNormQueryKeyValue",
    inputs=_INPUTS,
    shapes=("B T D", "D", "D", "D E", "E", "D F", "F", "D G", "G"),
    outputs=_OUTPUTS,
    exponents=(),
    attributes=(EPSILON,),
    kernel_attributes=(PRECISION,),
    body=_body,
    doc="LayerNorm(x) @ weight + bias (arXiv 1607.06450, eq. 4), for query, key and value each.",
)
onnx.defs.register_schema(LAYER_NORM_QUERY_KEY_VALUE.schema())
