"""Sums over the tokens of a 16-bit graph, and their scales, in float32.

The largest float16 is 65,504. The mean of a long document's tokens is below it, but their sum and
their number can exceed it. bfloat16 keeps only 8 bits of both.
"""

from collections.abc import Iterable, Iterator

import onnx
from onnx import TensorProto

from aftexport.passes.graph_values import constants_of, main_input_of
from aftexport.passes.token_reductions import is_reduction_over_tokens

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WIDE = (TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64)
_SCALES = frozenset((
    "Add", "Clip", "Div", "Expand", "Gather", "Identity", "Max", "Min", "Mul", "Pow", "Reciprocal",
    "Reshape", "Sqrt", "Squeeze", "Sub", "Unsqueeze",
))  # fmt: skip


def accumulate_in_float32(model: onnx.ModelProto) -> None:
    """Rewrite a lowered graph in place: pooled values are rounded to 16 bits once, for the head.

    Args:
        model: the result of ``lowering.lower``, with the types and shapes of intermediate values.
    """
    _Widener(model.graph).run()


class _Widener:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._constants = constants_of(graph)
        described = (*graph.input, *graph.value_info, *graph.output)
        self._described = {value.name: value for value in described}
        self._tokens = self._dims(main_input_of(graph))[1]
        self._wide: dict[str, str] = {}
        self._sums: set[str] = set()
        self._narrowed: set[str] = set()

    def run(self) -> None:
        nodes = [new for node in self._graph.node for new in self._rewritten(node)]
        nodes += self._narrow(output.name for output in self._graph.output)
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _rewritten(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        if not self._widens(node):
            yield from self._narrow(node.input)
            yield node
            return
        if node.op_type == "Cast" and self._element(node.input[0]) == TensorProto.FLOAT:
            self._wide[node.output[0]] = node.input[0]
            self._sums.add(node.output[0])
            return
        wide = onnx.NodeProto()
        wide.CopyFrom(node)
        for place, name in enumerate(node.input):
            if self._element(name) in _NARROW:
                if name not in self._wide:
                    yield self._cast(name, self._widened(name), TensorProto.FLOAT)
                wide.input[place] = self._wide[name]
        for attribute in wide.attribute:
            if attribute.name == "to":
                attribute.i = TensorProto.FLOAT
        wide.output[0] = self._widened(node.output[0])
        self._sums.add(node.output[0])
        yield wide

    def _widens(self, node: onnx.NodeProto) -> bool:
        name = node.output[0]
        if self._element(name) not in _NARROW or self._tokens in self._dims(name):
            return False
        if node.op_type == "Cast":
            return self._element(node.input[0]) in _WIDE
        if is_reduction_over_tokens(node, self._constants):
            return True
        return node.op_type in _SCALES and not self._sums.isdisjoint(node.input)

    def _narrow(self, names: Iterable[str]) -> Iterator[onnx.NodeProto]:
        for name in names:
            if name in self._sums - self._narrowed:
                self._narrowed.add(name)
                yield self._cast(self._wide[name], name, self._element(name))

    def _widened(self, name: str) -> str:
        wide = self._wide[name] = f"{name}_float32"
        if name in self._described:
            value = self._graph.value_info.add()
            value.CopyFrom(self._described[name])
            value.name, value.type.tensor_type.elem_type = wide, TensorProto.FLOAT
        return wide

    def _element(self, name: str) -> int:
        if name in self._constants:
            return int(onnx.helper.np_dtype_to_tensor_dtype(self._constants[name].dtype))
        value = self._described.get(name)
        return value.type.tensor_type.elem_type if value is not None else TensorProto.UNDEFINED

    def _dims(self, name: str) -> list[str | int]:
        shape = self._described[name].type.tensor_type.shape
        return [dim.dim_param or dim.dim_value for dim in shape.dim]

    @staticmethod
    def _cast(name: str, result: str, element: int) -> onnx.NodeProto:
        return onnx.helper.make_node("Cast", [name], [result], to=element)
