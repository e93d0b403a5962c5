"""The version of ONNX's file format, which runtimes compare with their newest known version."""

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from aftexport.errors import UsageError
from aftexport.system.contract import DEFAULT_OPSET

OPSETS = range(18, min(onnx.defs.onnx_opset_version(), 25) + 1)
"""Opsets that the portable bodies and the installed onnx support, and torch.onnx can produce."""
_OLDEST = 8
"""The first version with model-local functions."""
_NEWEST = 10
"""Later versions differ only in element types and in annotations for several devices."""
_INTRODUCED = {
    "FLOAT8E4M3FN": 9,
    "FLOAT8E4M3FNUZ": 9,
    "FLOAT8E5M2": 9,
    "FLOAT8E5M2FNUZ": 9,
    "INT4": 10,
    "UINT4": 10,
    "FLOAT4E2M1": 11,
    "FLOAT8E8M0": 12,
    "INT2": 13,  # onnx 1.20
    "UINT2": 13,
}
"""Element type to the version that introduced it, for versions later than ``_OLDEST``."""
_SINCE = {
    TensorProto.DataType.Value(name): since
    for name, since in _INTRODUCED.items()
    if name in TensorProto.DataType.keys()  # noqa: SIM118 (keys of an enumeration of protobuf)
}


def check_opset(opset: int) -> None:
    """Check an opset of the standard operators; raises UsageError if it is outside ``OPSETS``."""
    if opset not in OPSETS:
        raise UsageError(
            f"--opset must be {OPSETS[0]} to {OPSETS[-1]}, got {opset}.",
            f"Omit it for {DEFAULT_OPSET}.",
        )


def lower_format(model: onnx.ModelProto) -> None:
    """Set the oldest version of the file format that supports ``model``.

    torch.onnx writes version 10 for every opset, which ONNX Runtime 1.17 refuses.
    """
    standard = [o for o in model.opset_import if o.domain in ("", "ai.onnx")]
    by_opset = onnx.helper.find_min_ir_version_for(standard, ignore_unknown=True)
    needed = [_OLDEST, min(by_opset, _NEWEST)]
    needed += [_SINCE.get(element, _OLDEST) for element in _elements(model)]
    if any(function.overload for function in model.functions):
        needed.append(10)
    model.ir_version = max(needed)


def _elements(model: onnx.ModelProto) -> Iterator[int]:
    yield from _elements_of_graph(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _elements_of_node(node)


def _elements_of_graph(graph: onnx.GraphProto) -> Iterator[int]:
    for tensor in graph.initializer:
        yield tensor.data_type
    for sparse in graph.sparse_initializer:
        yield sparse.values.data_type
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.type.tensor_type.elem_type
    for node in graph.node:
        yield from _elements_of_node(node)


def _elements_of_node(node: onnx.NodeProto) -> Iterator[int]:
    for attribute in node.attribute:
        if attribute.name in ("to", "dtype", "output_dtype"):
            yield attribute.i
        if attribute.HasField("t"):
            yield attribute.t.data_type
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
            yield from _elements_of_graph(graph)
