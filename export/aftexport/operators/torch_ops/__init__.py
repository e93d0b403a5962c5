"""The definition of every operator in PyTorch, and the torch ops of the mechanisms.

Its import registers ``torch.ops.aftexport.*``.
"""

from collections.abc import Callable

from torch import Tensor

from aftexport.operators.schema import OnnxOperator
from aftexport.operators.torch_ops import (
    aft_conv,
    aft_full,
    aft_local,
    aft_simple,
    efficient_attention,
    encoder,
    fastformer,
    linear_attention,
)
from aftexport.operators.torch_ops.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.torch_ops.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.operators.torch_ops.softmax_attention import SOFTMAX_ATTENTION
from aftexport.operators.torch_ops.torch_op import Operator

_MODULES = (
    aft_full,
    aft_local,
    aft_simple,
    aft_conv,
    efficient_attention,
    fastformer,
    linear_attention,
)
OPERATORS: dict[str, Operator] = {
    operator.op_type: operator for module in _MODULES for operator in module.PAIR
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
    "AftFullPrepare": aft_full.prepare,
    "AftFullFinish": aft_full.finish,
    "LayerNormFastformer": encoder.layer_norm_fastformer,
    "LayerNormFeedForward": encoder.layer_norm_feed_forward,
    "LayerNormLinear": encoder.layer_norm_linear,
    "LayerNormQueryKeyValue": encoder.layer_norm_query_key_value,
    "LinearResidual": encoder.linear_residual,
}


def expected_outputs(
    operator: OnnxOperator, *inputs: Tensor | None, **attributes: object
) -> tuple[Tensor, ...]:
    """Return the outputs of an operator's definition; absent inputs are None or left out."""
    inputs += (None,) * (len(operator.inputs) - len(inputs))
    result = _REFERENCES[operator.op_type](*inputs, **attributes)
    return result if isinstance(result, tuple) else (result,)


__all__ = ["OPERATORS", "RECURRENT_OPERATORS", "SINGLE_OPERATORS", "Operator", "expected_outputs"]
