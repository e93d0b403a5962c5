"""The definition of every operator in PyTorch, and the torch ops of the mechanisms.

Its import registers ``torch.ops.aftexport.*``.
"""

from collections.abc import Callable

from torch import Tensor

from aftexport.operators.schema import OnnxOperator
from aftexport.operators.torch_ops import aft_full_product, encoder
from aftexport.operators.torch_ops.aft_conv import AFT_CONV, CAUSAL_AFT_CONV
from aftexport.operators.torch_ops.aft_full import AFT_FULL, CAUSAL_AFT_FULL
from aftexport.operators.torch_ops.aft_local import AFT_LOCAL, CAUSAL_AFT_LOCAL
from aftexport.operators.torch_ops.aft_simple import AFT_SIMPLE, CAUSAL_AFT_SIMPLE
from aftexport.operators.torch_ops.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.torch_ops.efficient_attention import (
    CAUSAL_EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION,
)
from aftexport.operators.torch_ops.fastformer import CAUSAL_FASTFORMER, FASTFORMER
from aftexport.operators.torch_ops.linear_attention import (
    CAUSAL_NORMALIZED_LINEAR_ATTENTION,
    NORMALIZED_LINEAR_ATTENTION,
)
from aftexport.operators.torch_ops.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.operators.torch_ops.softmax_attention import SOFTMAX_ATTENTION
from aftexport.operators.torch_ops.torch_op import Operator

OPERATORS: dict[str, Operator] = {
    operator.op_type: operator
    for operator in (
        AFT_FULL,
        CAUSAL_AFT_FULL,
        AFT_LOCAL,
        CAUSAL_AFT_LOCAL,
        AFT_SIMPLE,
        CAUSAL_AFT_SIMPLE,
        AFT_CONV,
        CAUSAL_AFT_CONV,
        EFFICIENT_ATTENTION,
        CAUSAL_EFFICIENT_ATTENTION,
        FASTFORMER,
        CAUSAL_FASTFORMER,
        NORMALIZED_LINEAR_ATTENTION,
        CAUSAL_NORMALIZED_LINEAR_ATTENTION,
    )
}
"""The operators of the mechanisms that have a causal twin, by ONNX name."""

RECURRENT_OPERATORS: dict[str, Operator] = {
    operator.op_type: operator for operator in (RECURRENT_LINEAR_ATTENTION, CAUSAL_DEPTHWISE_CONV)
}
"""The operators with a state, by ONNX name."""

SINGLE_OPERATORS: dict[str, Operator] = {
    **RECURRENT_OPERATORS,
    SOFTMAX_ATTENTION.op_type: SOFTMAX_ATTENTION,
}
"""The operators without a causal twin, by ONNX name."""

_REFERENCES: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    **{name: o.reference for name, o in (OPERATORS | SINGLE_OPERATORS).items()},
    "AftFullPrepare": aft_full_product.prepare,
    "AftFullFinish": aft_full_product.finish,
    "LayerNormFastformer": encoder.layer_norm_fastformer,
    "LayerNormFeedForward": encoder.layer_norm_feed_forward,
    "LayerNormLinear": encoder.layer_norm_linear,
    "LayerNormQueryKeyValue": encoder.layer_norm_query_key_value,
    "LinearResidual": encoder.linear_residual,
}


def expected_outputs(
    operator: OnnxOperator, *inputs: Tensor | None, **attributes: object
) -> tuple[Tensor, ...]:
    """Return the outputs of the definition of an operator, in the order of its ``outputs``.

    Optional inputs that are absent are None, or are left out at the end.
    """
    inputs += (None,) * (len(operator.inputs) - len(inputs))
    result = _REFERENCES[operator.op_type](*inputs, **attributes)
    return result if isinstance(result, tuple) else (result,)


__all__ = ["OPERATORS", "RECURRENT_OPERATORS", "SINGLE_OPERATORS", "Operator", "expected_outputs"]
