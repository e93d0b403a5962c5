"""The mechanisms: for each an ONNX operator and its portable body; they need no torch."""

from aftexport.operators.mechanisms import (
    aft_conv,
    aft_full,
    aft_local,
    aft_simple,
    efficient_attention,
    fastformer,
    linear_attention,
)
from aftexport.operators.mechanisms.aft_full import AFT_FULL_FINISH, AFT_FULL_PREPARE
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.operators.mechanisms.softmax_attention import SOFTMAX_ATTENTION
from aftexport.operators.schema import MechanismOperator, OnnxOperator

_MODULES = (
    aft_full,
    aft_local,
    aft_simple,
    aft_conv,
    efficient_attention,
    fastformer,
    linear_attention,
)
OPERATORS: dict[str, MechanismOperator] = {
    operator.op_type: operator for module in _MODULES for operator in module.PAIR
}
"""The operators of the mechanisms that have a causal twin, by ONNX name."""

RECURRENT_OPERATORS: dict[str, MechanismOperator] = {
    operator.op_type: operator for operator in (RECURRENT_LINEAR_ATTENTION, CAUSAL_DEPTHWISE_CONV)
}
"""The operators with a state, by ONNX name; they have a direction or none instead of a twin."""

SINGLE_OPERATORS: dict[str, MechanismOperator] = {
    **RECURRENT_OPERATORS,
    SOFTMAX_ATTENTION.op_type: SOFTMAX_ATTENTION,
}
"""The operators without a causal twin, by ONNX name; softmax attention has windows instead."""

PRODUCT_OPERATORS: dict[str, OnnxOperator] = {
    operator.op_type: operator for operator in (AFT_FULL_PREPARE, AFT_FULL_FINISH)
}
"""The operators around AFT-full's matrix product, by ONNX name; engines put them into graphs."""

MECHANISMS: tuple[str, ...] = tuple(dict.fromkeys(o.stem for o in OPERATORS.values()))
"""The stems of the mechanisms with a twin, which name their files in every layer."""

__all__ = [
    "MECHANISMS",
    "OPERATORS",
    "PRODUCT_OPERATORS",
    "RECURRENT_OPERATORS",
    "SINGLE_OPERATORS",
    "MechanismOperator",
]
