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

_TYPE_OF_OUTPUT = {
    "BlackmanWindow": "output_datatype",
    "ConstantOfShape": "value",
    "HammingWindow": "output_datatype",
    "HannWindow": "output_datatype",
    "MelWeightMatrix": "output_datatype",
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "SequenceEmpty": "dtype",
}
"""The operators whose output is float32 without this attribute."""
_TYPES = ("to", "dtype", "output_datatype", "output_dtype")
"""The attributes that name a type."""


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
    widening = _Widening(types, to)
    widening.graph(model.graph)
    for function in model.functions:
        widening.values(function.value_info)
        widening.attributes(function.attribute_proto)
        widening.nodes(function.node)


def widen_nodes(nodes: Iterable[onnx.NodeProto], types: Collection[int], to: int) -> None:
    """Convert every tensor of ``types`` in some nodes to type ``to``."""
    _Widening(types, to).nodes(nodes)


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
        self.values((*graph.input, *graph.output, *graph.value_info))
        self.nodes(graph.node)

    def values(self, values: Iterable[onnx.ValueInfoProto]) -> None:
        for value in values:
            self._type(value.type)

    def _type(self, of: onnx.TypeProto) -> None:
        kind = of.WhichOneof("value")
        if kind == "tensor_type" and of.tensor_type.elem_type in self._types:
            of.tensor_type.elem_type = self._to
        elif kind in ("sequence_type", "optional_type"):
            self._type(getattr(of, kind).elem_type)

    def nodes(self, nodes: Iterable[onnx.NodeProto]) -> None:
        for node in nodes:
            if TensorProto.FLOAT in self._types and node.domain in ("", "ai.onnx"):
                self._name_type(node)
            self.attributes(node.attribute)

    def _name_type(self, node: onnx.NodeProto) -> None:
        """Write the attribute for the type of a node whose output is float32 without it."""
        name = _TYPE_OF_OUTPUT.get(node.op_type)
        if name is None or any(attribute.name == name for attribute in node.attribute):
            return
        zero = onnx.helper.make_tensor("", TensorProto.FLOAT, [1], [0.0])
        of_type = zero if name == "value" else TensorProto.FLOAT
        node.attribute.append(onnx.helper.make_attribute(name, of_type))

    def attributes(self, attributes: Iterable[onnx.AttributeProto]) -> None:
        for attribute in attributes:
            if attribute.name in _TYPES and attribute.i in self._types:
                attribute.i = self._to
            if attribute.name in ("value_float", "value_floats"):
                self._constant(attribute)
            if attribute.HasField("t"):
                self._tensor(attribute.t)
            if attribute.HasField("g"):
                self.graph(attribute.g)

    def _constant(self, attribute: onnx.AttributeProto) -> None:
        """Write the numbers of a Constant, which are float32, as a tensor."""
        if TensorProto.FLOAT not in self._types or attribute.ref_attr_name:
            return
        is_list = attribute.name == "value_floats"
        numbers = list(attribute.floats) if is_list else [attribute.f]
        shape = [len(numbers)] if is_list else []
        value = onnx.helper.make_tensor("", self._to, shape, numbers)
        attribute.CopyFrom(onnx.helper.make_attribute("value", value))

    def _tensor(self, tensor: onnx.TensorProto) -> None:
        if tensor.data_type in self._types:
            wide = onnx.numpy_helper.to_array(tensor).astype(self._dtype)
            tensor.CopyFrom(onnx.numpy_helper.from_array(wide, tensor.name))
