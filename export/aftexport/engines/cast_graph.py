"""Conversion of a graph to a wider type.

A bfloat16 graph becomes a float32 graph for a runtime without bfloat16 products. Any graph
becomes a float64 graph for comparison. The wider type contains every narrow number, so the
weights stay the same; the activations keep more digits. Operators that ONNX Runtime has only in
float32 become functions of others in float64.

Servers need this at load, and images leave onnx_ir out, since its sympy takes 80 MB. So the graph
changes as protobuf.
"""

from collections.abc import Collection, Iterable, Iterator
from math import prod

import onnx
import onnx.parser
from onnx import TensorProto

from aftexport.operators.domain import opset_of

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


_DOMAIN = "ai.aftexport.float64"
_NAMES = {"Erf": "Erf64", "Gelu": "Gelu64"}
_COEFFICIENTS = (
    -1.3026537197817094, 6.4196979235649026e-1, 1.9476473204185836e-2, -9.561514786808631e-3,
    -9.46595344482036e-4, 3.66839497852761e-4, 4.2523324806907e-5, -2.0278578112534e-5,
    -1.624290004647e-6, 1.303655835580e-6, 1.5626441722e-8, -8.5238095915e-8,
    6.529054439e-9, 5.059343495e-9, -9.91364156e-10, -2.27365122e-10,
    9.6467911e-11, 2.394038e-12, -6.886027e-12, 8.94487e-13,
    3.13092e-13, -1.12708e-13, 3.81e-16, 7.106e-15,
    -1.523e-15, -9.4e-17, 1.21e-16, -2.8e-17,
)  # fmt: skip
"""Chebyshev coefficients of ``log(erfc(z) exp(z^2) / t)`` for ``t = 2 / (2 + z)``, ``z >= 0``.

The error of erf is below 1e-15. From Numerical Recipes, third edition, section 6.2.2.
"""


def add_float64_operators(model: onnx.ModelProto) -> None:
    """Replace Erf and Gelu in a float64 graph by functions, in place."""
    if not _rename(model.graph.node):
        return
    opset = opset_of(model)
    functions = [onnx.parser.parse_function(_erf(opset)), onnx.parser.parse_function(_gelu(opset))]
    model.functions.extend(functions)
    model.opset_import.append(onnx.helper.make_opsetid(_DOMAIN, 1))


def _rename(nodes: Iterable[onnx.NodeProto]) -> int:
    """Give nodes the names of the functions; return their number."""
    count = 0
    for node in nodes:
        for attribute in node.attribute:
            for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                count += _rename(graph.node)
        if node.domain == "" and node.op_type in _NAMES and not _is_tanh(node):
            node.op_type, node.domain = _NAMES[node.op_type], _DOMAIN
            del node.attribute[:]
            count += 1
    return count


def _is_tanh(node: onnx.NodeProto) -> bool:
    """Return whether a Gelu is that of the hyperbolic tangent, which needs no Erf."""
    return any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)


def _erf(opset: int) -> str:
    """Return the function of erf, by Clenshaw's recurrence."""
    lines, number = [], 0

    def let(expression: str) -> str:
        nonlocal number
        number += 1
        lines.append(f"v{number} = {expression}")
        return f"v{number}"

    def scalar(value: float) -> str:
        return let(f"Constant <value = double {{{value!r}}}> ()")

    one, two = scalar(1.0), scalar(2.0)
    z = let("Abs (x)")
    t = let(f"Div ({two}, {let(f'Add ({two}, {z})')})")
    ty = let(f"Sub ({let(f'Mul ({t}, {scalar(4.0)})')}, {two})")
    d, dd = scalar(0.0), scalar(0.0)
    for coefficient in reversed(_COEFFICIENTS[1:]):
        kept = d
        scaled = let(f"Sub ({let(f'Mul ({ty}, {d})')}, {dd})")
        d, dd = let(f"Add ({scaled}, {scalar(coefficient)})"), kept
    series = let(f"Add ({let(f'Mul ({ty}, {d})')}, {scalar(_COEFFICIENTS[0])})")
    half = let(f"Sub ({let(f'Mul ({series}, {scalar(0.5)})')}, {dd})")
    exponent = let(f"Sub ({half}, {let(f'Mul ({z}, {z})')})")
    rest = let(f"Mul ({t}, {let(f'Exp ({exponent})')})")
    lines.append(f"y = Mul ({let('Sign (x)')}, {let(f'Sub ({one}, {rest})')})")
    return _function("Erf64", opset, lines)


def _gelu(opset: int) -> str:
    lines = [
        "root = Constant <value = double {1.4142135623730951}> ()",
        "half = Constant <value = double {0.5}> ()",
        "one = Constant <value = double {1.0}> ()",
        "scaled = Div (x, root)",
        f"e = {_DOMAIN}.Erf64 (scaled)",
        "sum = Add (one, e)",
        "product = Mul (x, sum)",
        "y = Mul (half, product)",
    ]
    return _function("Gelu64", opset, lines)


def _function(name: str, opset: int, lines: list[str]) -> str:
    body = "\n".join(lines)
    imports = f'"" : {opset}, "{_DOMAIN}" : 1'
    return f'<domain: "{_DOMAIN}", opset_import: [{imports}]> {name} (x) => (y) {{\n{body}\n}}'
