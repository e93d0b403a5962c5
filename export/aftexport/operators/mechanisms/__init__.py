"""The mechanisms: for each an ONNX operator and its portable body; they need no torch."""

from aftexport.operators.mechanisms.aft_conv import AFT_CONV, CAUSAL_AFT_CONV
from aftexport.operators.mechanisms.aft_full import AFT_FULL, CAUSAL_AFT_FULL
from aftexport.operators.mechanisms.aft_local import AFT_LOCAL, CAUSAL_AFT_LOCAL
from aftexport.operators.mechanisms.aft_simple import AFT_SIMPLE, CAUSAL_AFT_SIMPLE
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
"""The mechanisms' operators by ONNX name."""

MECHANISMS: tuple[str, ...] = tuple(dict.fromkeys(o.stem for o in OPERATORS.values()))
"""The stems that name a mechanism's file in every layer of the project."""

__all__ = ["MECHANISMS", "OPERATORS", "MechanismOperator"]
