"""Every operator of the domain, by ONNX name."""

from aftexport import encoder, mechanisms
from aftexport.operators import OnnxOperator

ALL_OPERATORS: dict[str, OnnxOperator] = {**mechanisms.OPERATORS, **encoder.OPERATORS}
