"""Parts of torch.onnx for translations of operators to ONNX."""

from aftexport.system.internals.versions import Versions

VERSIONS = Versions("torch", "2.9", "2.15")

with VERSIONS.named():
    from torch.onnx._internal.exporter._errors import DispatchError
    from torch.onnx._internal.exporter._registration import ONNXRegistry
    from torch.onnx._internal.exporter._torchlib.ops.hop import call_op

ATTRIBUTES = ("ONNXRegistry.from_torchlib", "ONNXRegistry().functions")
"""Attributes of these parts that other modules use."""

__all__ = ["DispatchError", "ONNXRegistry", "call_op"]
