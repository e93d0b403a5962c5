"""Operators of the encoder around the attention: norms, products and the feed-forward network.

One more operator computes a whole Fastformer layer, whose attention commutes with its products.
PyTorch models do not call these operators; ``aftexport.lowering`` finds them in exported graphs.
"""

from aftexport.operators.encoder.layer_norm_fastformer import LAYER_NORM_FASTFORMER
from aftexport.operators.encoder.layer_norm_feed_forward import LAYER_NORM_FEED_FORWARD
from aftexport.operators.encoder.layer_norm_linear import LAYER_NORM_LINEAR
from aftexport.operators.encoder.layer_norm_query_key_value import LAYER_NORM_QUERY_KEY_VALUE
from aftexport.operators.encoder.linear_residual import LINEAR_RESIDUAL
from aftexport.operators.schema import OnnxOperator

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
