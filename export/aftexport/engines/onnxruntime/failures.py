"""The exceptions of ONNX Runtime."""

from aftexport.engines.onnxruntime.package import native

FAILURES = (native.Fail, native.InvalidArgument, native.InvalidGraph, native.InvalidProtobuf,
            native.NotImplemented, native.RuntimeException, native.NoSuchFile,
            RuntimeError, ValueError)  # fmt: skip


def reason(error: Exception) -> str:
    """Return the first line of an exception without the codes before it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.rpartition(" : ")[2].strip().rstrip(".")
