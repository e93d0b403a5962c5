"""Rewrites of graphs that ONNX Runtime's own optimizer breaks, for sessions without options.

fault                  versions      effect
MatmulTransposeFusion  1.24 to 1.31  swaps Transpose and Cast before a MatMul of another rank,
                                     and leaves nodes without a schema: NchwcTransformer, the
                                     next step, crashes (microsoft/onnxruntime issue 28392)
MatmulTransposeFusion  to 1.30       makes a FusedMatMul of float64, which has no kernel (28136)
PadFusion              1.17 to 1.31  turns the zeros of a Pad into padding of a pooling: a maximum
                                     ignores padding, and padding above the window is refused
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto

from aftexport.operators.domain import DOMAIN

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Types without a MatMul on the CPU: the runtime inserts a Cast before it."""
_CASTS = ("Cast", "CastLike")
_POOLS = ("AveragePool", "MaxPool", "LpPool")
_PASSED = frozenset((
    "Abs", "Add", "Cast", "CastLike", "Clip", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu",
    "Identity", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Relu", "Sigmoid", "Sqrt",
    "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators that the optimizer removes if they have no effect, or moves a Transpose through."""
_PAD_AXES = 18
"""The first opset in which a Pad may name its axes."""


def avoid_optimizer_faults(model: onnx.ModelProto) -> None:
    """Rewrite the parts of ``model`` that a default session of ONNX Runtime breaks, in place.

    Args:
        model: the graph, with bare custom operators. Shapes in its ``value_info`` avoid rewrites
            of products whose operands have equal ranks.
    """
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    names = _names(model.graph)
    for graph in _graphs(model.graph):
        _Rewriter(graph, opset, names).run()


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _names(whole: onnx.GraphProto) -> set[str]:
    names = set[str]()
    for graph in _graphs(whole):
        names |= {value.name for value in (*graph.input, *graph.initializer)}
        names |= {name for node in graph.node for name in node.output}
    return names


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto, opset: int, names: set[str]) -> None:
        self._graph = graph
        self._opset = opset
        self._names = names
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        described = (*graph.input, *graph.value_info, *graph.output)
        self._described = {value.name: value.type.tensor_type for value in described}
        self._has_pools = any(node.op_type in _POOLS for node in graph.node)
        self._transposed = set[str]()
        self._cast = set[str]()
        self._apart: dict[str, str] = {}

    def run(self) -> None:
        nodes = list[onnx.NodeProto]()
        for node in self._graph.node:
            nodes += self._barriers(node)
            nodes.append(node)
            self._look_through(node)
            if self._has_pools and node.op_type == "Pad" and len(node.input) < 4:
                self._name_axes(node)
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _look_through(self, node: onnx.NodeProto) -> None:
        if node.op_type in _PASSED and not node.domain:
            is_transpose = node.op_type == "Transpose"
            is_transposed = is_transpose or not self._transposed.isdisjoint(node.input)
            is_cast = node.op_type in _CASTS or not self._cast.isdisjoint(node.input)
            self._transposed.update(node.output if is_transposed else ())
            self._cast.update(node.output if is_cast else ())

    def _is_swapped(self, node: onnx.NodeProto, name: str) -> bool:
        """Return whether the optimizer may move a Transpose to ``node`` through input ``name``."""
        if name not in self._transposed or (node.op_type != "MatMul" and node.domain != DOMAIN):
            return False
        elements = {self._element(other) for other in node.input}
        if TensorProto.DOUBLE in elements:
            return True
        ranks = {self._rank(other) for other in node.input}
        if self._rank(name) == 2 or (
            node.op_type == "MatMul" and len(ranks) == 1 and None not in ranks
        ):
            return False
        is_narrow = not elements.isdisjoint(_NARROW) or elements == {TensorProto.UNDEFINED}
        return is_narrow or name in self._cast

    def _barriers(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """Yield nodes before ``node``: a Reshape to the same shape, which stops the optimizer."""
        for place, name in enumerate(node.input):
            if not self._is_swapped(node, name):
                continue
            if name not in self._apart:
                shape, kept = self._fresh(f"val_shape_{name}"), self._fresh(f"val_kept_{name}")
                yield onnx.helper.make_node("Shape", [name], [shape])
                yield onnx.helper.make_node("Reshape", [name, shape], [kept])
                self._apart[name] = kept
            node.input[place] = self._apart[name]

    def _name_axes(self, node: onnx.NodeProto) -> None:
        mode = next((a.s for a in node.attribute if a.name == "mode"), b"constant")
        rank = self._rank(node.input[0])
        if rank is None and node.input[1] in self._weights:
            rank = self._weights[node.input[1]].dims[0] // 2
        if mode != b"constant" or rank is None or self._opset < _PAD_AXES:
            return
        axes = self._fresh(f"val_axes_{node.output[0]}")
        self._graph.initializer.append(onnx.numpy_helper.from_array(np.arange(rank), axes))
        node.input.extend([""] * (3 - len(node.input)) + [axes])

    def _fresh(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def _element(self, name: str) -> int:
        if name in self._weights:
            return int(self._weights[name].data_type)
        kind = self._described.get(name)
        return int(kind.elem_type if kind is not None else TensorProto.UNDEFINED)

    def _rank(self, name: str) -> int | None:
        if name in self._weights:
            return len(self._weights[name].dims)
        kind = self._described.get(name)
        return len(kind.shape.dim) if kind is not None and kind.HasField("shape") else None
