"""Every operator of the domain, by ONNX name."""

from aftexport.operators import encoder, mechanisms
from aftexport.operators.schema import OnnxOperator

ALL_OPERATORS: dict[str, OnnxOperator] = {
    **mechanisms.OPERATORS,
    **mechanisms.RECURRENT_OPERATORS,
    **encoder.OPERATORS,
}
