"""Sums over the tokens of a 16-bit graph, and their scales, in float32.

The largest float16 is 65,504. The mean of a long document's tokens is below it, but their sum and
their number can exceed it. bfloat16 keeps only 8 bits of both.
"""

import onnx
import onnx_ir as ir

from aftexport.lowering.graph_values import (
    axes_of,
    constants_of,
    is_reduction_over_tokens,
    main_input_of,
)

_FLOAT = ir.DataType.FLOAT
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_WIDE = (_FLOAT, ir.DataType.INT32, ir.DataType.INT64)
_SCALES = frozenset((
    "Add", "Clip", "Div", "Expand", "Gather", "Identity", "Max", "Min", "Mul", "Pow", "Reciprocal",
    "Reshape", "Sqrt", "Squeeze", "Sub", "Unsqueeze",
))  # fmt: skip


def accumulate_in_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose pooled values are rounded to 16 bits once, for the head.

    The graph needs the types and shapes of intermediate values. It stays unchanged, and is returned
    if it has no sum in 16 bits.
    """
    rewritten = ir.from_proto(model)
    return ir.to_proto(rewritten) if _Widener(rewritten.graph).run() else model


class _Widener:
    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._constants = constants_of(graph)
        self._tokens = axes_of(main_input_of(graph))[1]
        self._wide: dict[ir.Value, ir.Value] = {}
        self._rounded: dict[ir.Value, ir.Value] = {}
        self._sums: dict[ir.Value, ir.Node] = {}

    def run(self) -> bool:
        """Rewrite the graph; return whether it changed."""
        for node in tuple(self._graph):
            if self._widens(node):
                self._widen(node)
            else:
                self._read_rounded(node)
        for place, output in enumerate(self._graph.outputs):
            if output in self._sums:
                self._graph.outputs[place] = self._rounded_sum(output, None)
        self._graph.remove(self._sums.values(), safe=True)
        return bool(self._sums)

    def _widens(self, node: ir.Node) -> bool:
        result = node.outputs[0]
        if self._element(result) not in _NARROW or self._tokens in axes_of(result):
            return False
        if node.op_type == "Cast":
            return self._element(node.inputs[0]) in _WIDE
        if is_reduction_over_tokens(node, self._constants):
            return True
        return node.op_type in _SCALES and any(value in self._sums for value in node.inputs)

    def _widen(self, node: ir.Node) -> None:
        """Compute the sum or scale of a node in float32; the node itself is removed later."""
        result, first = node.outputs[0], node.inputs[0]
        self._sums[result] = node
        if node.op_type == "Cast" and first is not None and self._element(first) == _FLOAT:
            self._wide[result] = first
            return
        attributes = dict(node.attributes)
        if "to" in attributes:
            attributes["to"] = ir.AttrInt64("to", _FLOAT)
        wide = ir.Node(
            node.domain,
            node.op_type,
            [self._widened(value, node) for value in node.inputs],
            attributes.values(),
        )
        self._graph.insert_before(node, wide)
        self._wide[result] = _described(wide.outputs[0], result, f"{result.name}_float32", _FLOAT)

    def _read_rounded(self, node: ir.Node) -> None:
        """Let a node, and the nodes of the graphs in it, read sums in 16 bits."""
        inner = [node]
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                inner += attribute.as_graph().all_nodes()
        for reader in inner:
            for place, value in enumerate(reader.inputs):
                if value is not None and value in self._sums:
                    is_widened = reader.op_type == "Cast" and reader.outputs[0].dtype == _FLOAT
                    read = self._wide[value] if is_widened else self._rounded_sum(value, node)
                    reader.replace_input_with(place, read)

    def _widened(self, value: ir.Value | None, reader: ir.Node) -> ir.Value | None:
        if value is None or self._element(value) not in _NARROW:
            return value
        if value not in self._wide:
            wide = self._cast(value, _FLOAT, reader)
            self._wide[value] = _described(wide, value, f"{value.name}_float32", _FLOAT)
        return self._wide[value]

    def _rounded_sum(self, value: ir.Value, reader: ir.Node | None) -> ir.Value:
        """Return a sum in 16 bits, under the name of the value that it replaces."""
        if value not in self._rounded:
            element = self._element(value)
            assert element is not None  # a sum has 16 bits
            rounded = self._cast(self._wide[value], element, reader)
            self._rounded[value] = _described(rounded, value, str(value.name), element)
        return self._rounded[value]

    def _cast(self, value: ir.Value, to: ir.DataType, reader: ir.Node | None) -> ir.Value:
        """Return a value in another type, computed before ``reader`` or at the end."""
        node = ir.node("Cast", [value], {"to": to})
        if reader is None:
            self._graph.append(node)
        else:
            self._graph.insert_before(reader, node)
        return node.outputs[0]

    def _element(self, value: ir.Value | None) -> ir.DataType | None:
        name = "" if value is None else str(value.name)
        if name in self._constants:
            return ir.DataType.from_numpy(self._constants[name].dtype)
        return None if value is None else value.dtype


def _described(value: ir.Value, like: ir.Value, name: str, element: ir.DataType) -> ir.Value:
    """Give a value a name, a type, and the shape of another one; return it."""
    value.name, value.dtype, value.shape = name, element, like.shape
    return value
