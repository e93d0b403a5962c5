"""The exceptions of ONNX Runtime."""

from aftexport.engines.onnxruntime.package import native

FAILURES = (native.Fail, native.InvalidArgument, native.InvalidGraph, native.InvalidProtobuf,
            native.NotImplemented, native.RuntimeException, native.NoSuchFile,
            RuntimeError, ValueError)  # fmt: skip

_GRAPH_FAULTS = (native.InvalidGraph, native.InvalidProtobuf, native.NotImplemented)
_OUT_OF_MEMORY = ("Failed to allocate memory", "bad_alloc", "out of memory")


def is_graph_fault(error: Exception) -> bool:
    """Return whether the model caused a failure, whatever the machine has."""
    return isinstance(error, _GRAPH_FAULTS)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def reason(error: Exception) -> str:
    """Return the first line of an exception without the codes before it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition(" : ")[2].strip().rstrip(".")


def load_remedy(error: Exception) -> str:
    """Return the remedy for a model that ONNX Runtime refuses to load."""
    text = reason(error)
    if "opset" in text.lower():
        return "Export it again with a lower --opset."
    if "implementation" in text or (is_graph_fault(error) and "node" in text.lower()):
        return "Write the operator in this message in others, or in float32, and export again."
    return "Export it again."
