"""The mechanisms: for each an ONNX operator and its portable body; they need no torch."""

from aftexport.operators.mechanisms.aft_conv import AFT_CONV, CAUSAL_AFT_CONV
from aftexport.operators.mechanisms.aft_full import AFT_FULL, CAUSAL_AFT_FULL
from aftexport.operators.mechanisms.aft_full_product import AFT_FULL_FINISH, AFT_FULL_PREPARE
from aftexport.operators.mechanisms.aft_local import AFT_LOCAL, CAUSAL_AFT_LOCAL
from aftexport.operators.mechanisms.aft_simple import AFT_SIMPLE, CAUSAL_AFT_SIMPLE
from aftexport.operators.mechanisms.causal_depthwise_conv import CAUSAL_DEPTHWISE_CONV
from aftexport.operators.mechanisms.efficient_attention import (
    CAUSAL_EFFICIENT_ATTENTION,
    EFFICIENT_ATTENTION,
)
from aftexport.operators.mechanisms.fastformer import CAUSAL_FASTFORMER, FASTFORMER
from aftexport.operators.mechanisms.linear_attention import (
    CAUSAL_NORMALIZED_LINEAR_ATTENTION,
    NORMALIZED_LINEAR_ATTENTION,
)
from aftexport.operators.mechanisms.mechanism import MechanismOperator
from aftexport.operators.mechanisms.recurrent_linear_attention import RECURRENT_LINEAR_ATTENTION
from aftexport.operators.mechanisms.softmax_attention import SOFTMAX_ATTENTION
from aftexport.operators.schema import OnnxOperator

OPERATORS: dict[str, MechanismOperator] = {
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
