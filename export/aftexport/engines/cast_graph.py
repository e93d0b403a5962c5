"""Conversion of a graph to a wider type.

A bfloat16 graph becomes a float32 graph for a runtime without bfloat16 products. Any graph
becomes a float64 graph for comparison. The wider type contains every narrow number, so the
weights stay the same; the activations keep more digits.
"""

from collections.abc import Collection, Iterable, Iterator
from math import prod

import onnx
import onnx_ir as ir
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
) -> onnx.ModelProto:
    """Return a model, whose weights are loaded, with every tensor of ``types`` in type ``to``."""
    wide = ir.from_proto(model)
    widening = _Widening(types, ir.DataType(to))
    widening.graph(wide.graph)
    for function in wide.functions.values():
        widening.nodes(function)
    return ir.to_proto(wide)


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
    def __init__(self, types: Collection[int], to: ir.DataType) -> None:
        self._types = types
        self._to = to

    def graph(self, graph: ir.Graph) -> None:
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = self._tensor(value.const_value)
        for value in (*graph.inputs, *graph.initializers.values()):
            self._value(value)
        self.nodes(graph)

    def nodes(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            for name in tuple(node.attributes):
                node.attributes.add(self._attribute(node.attributes.pop(name)))
            for output in node.outputs:
                self._value(output)

    def _value(self, value: ir.Value) -> None:
        if value.dtype in self._types:
            value.dtype = self._to

    def _attribute(self, attribute: ir.Attr) -> ir.Attr:
        if attribute.is_ref():
            return attribute
        if attribute.name in ("to", "dtype") and attribute.value in self._types:
            return ir.AttrInt64(attribute.name, self._to)
        if attribute.name == "value_float" and ir.DataType.FLOAT in self._types:
            return ir.AttrTensor("value", ir.tensor(attribute.as_float(), self._to))
        if attribute.type == ir.AttributeType.TENSOR:
            return ir.AttrTensor(attribute.name, self._tensor(attribute.as_tensor()))
        if attribute.type == ir.AttributeType.GRAPH:
            self.graph(attribute.as_graph())
        return attribute

    def _tensor(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """Return a tensor in the wider type, which is converted when the model is written."""
        if tensor.dtype not in self._types:
            return tensor

        def converted() -> ir.TensorProtocol:
            return ir.tensor(tensor.numpy().astype(self._to.numpy()), name=tensor.name)

        return ir.LazyTensor(converted, self._to, ir.Shape(tensor.shape.numpy()), name=tensor.name)
