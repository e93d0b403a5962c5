"""Conversion of a graph to a wider type.

A bfloat16 graph becomes a float32 graph for a runtime without bfloat16 products. Any graph
becomes a float64 graph for comparison. The wider type contains every narrow number, so the
weights stay the same; the activations keep more digits.

Servers need this at load, and images leave onnx_ir out, since its sympy takes 80 MB. So the graph
changes as protobuf.
"""

from collections.abc import Collection, Iterable, Iterator
from math import prod

import onnx
from onnx import TensorProto


def has_bfloat16(model: onnx.ModelProto) -> bool:
    """Return whether a weight, an input or an output is bfloat16."""
    graph = model.graph
    values = (*graph.input, *graph.output)
    return any(t.data_type == TensorProto.BFLOAT16 for t in graph.initializer) or any(
        v.type.tensor_type.elem_type == TensorProto.BFLOAT16 for v in values
    )


def widen(
    model: onnx.ModelProto,
    types: Collection[int] = (TensorProto.BFLOAT16,),
    to: int = TensorProto.FLOAT,
) -> None:
    """Convert every tensor of ``types`` in ``model``, whose weights are loaded, to type ``to``."""
    _Widening(types, to).graph(model.graph)
    for function in model.functions:
        _Widening(types, to).nodes(function.node)


def widened_bytes(model: onnx.ModelProto, types: Collection[int], to: int) -> int:
    """Return the size of ``model`` after ``widen``, without a copy; its tensors are counted."""
    wide = onnx.helper.tensor_dtype_to_np_dtype(to).itemsize
    narrow = [tensor for tensor in _tensors(model.graph) if tensor.data_type in types]
    for function in model.functions:
        narrow += [t for t in _node_tensors(function.node) if t.data_type in types]
    size: int = model.ByteSize() + sum(wide * prod(t.dims) - t.ByteSize() for t in narrow)
    return size


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            if attribute.HasField("g"):
                yield from _tensors(attribute.g)


class _Widening:
    def __init__(self, types: Collection[int], to: int) -> None:
        self._types = types
        self._to = to
        self._dtype = onnx.helper.tensor_dtype_to_np_dtype(to)

    def graph(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self._tensor(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in self._types:
                value.type.tensor_type.elem_type = self._to
        self.nodes(graph.node)

    def nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            for attribute in node.attribute:
                if attribute.name in ("to", "dtype") and attribute.i in self._types:
                    attribute.i = self._to
                if attribute.name == "value_float" and TensorProto.FLOAT in self._types:
                    value = onnx.helper.make_tensor("", self._to, [], [attribute.f])
                    attribute.CopyFrom(onnx.helper.make_attribute("value", value))
                if attribute.HasField("t"):
                    self._tensor(attribute.t)
                if attribute.HasField("g"):
                    self.graph(attribute.g)

    def _tensor(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_type in self._types:
            wide = onnx.numpy_helper.to_array(tensor).astype(self._dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
