"""ONNX Runtime, the default engine."""

from aftexport.engines.onnxruntime.engine import OnnxRuntimeEngine, operator_paths
from aftexport.engines.onnxruntime.package import VERSION
from aftexport.engines.onnxruntime.providers import PROVIDERS, Provider
from aftexport.engines.onnxruntime.sessions import session, session_options

__all__ = [
    "PROVIDERS",
    "VERSION",
    "OnnxRuntimeEngine",
    "Provider",
    "operator_paths",
    "session",
    "session_options",
]
