"""Every operator of the domain, by ONNX name."""

from aftexport.operators import encoder, mechanisms
from aftexport.operators.domain import operator_name
from aftexport.operators.schema import OnnxOperator

ALL_OPERATORS: dict[str, OnnxOperator] = {
    **mechanisms.OPERATORS,
    **mechanisms.SINGLE_OPERATORS,
    **mechanisms.PRODUCT_OPERATORS,
    **encoder.OPERATORS,
}


def operator_of(op_type: str) -> OnnxOperator | None:
    """Return the operator of a node's type, which may name a form; None if it is unknown."""
    return ALL_OPERATORS.get(operator_name(op_type))
