"""Rewrites of what ONNX Runtime's own optimizer breaks, so that a session without options runs it.

fault                  versions      what it does
MatmulTransposeFusion  1.24 to 1.31  swaps Transpose and Cast before a MatMul of another rank,
                                     and leaves nodes without a schema: NchwcTransformer, the
                                     next step, crashes (microsoft/onnxruntime issue 28392)
MatmulTransposeFusion  to 1.30       makes a FusedMatMul of float64, which has no kernel (28136)
PadFusion              1.17 to 1.31  gives a pooling the zeros of a Pad as padding: a largest
                                     value ignores these, and more than the window are refused
"""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto

from aftexport.operators.domain import DOMAIN

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Types that a CPU has no MatMul of, so that the runtime puts a Cast before it."""
_CASTS = ("Cast", "CastLike")
_POOLS = ("AveragePool", "MaxPool", "LpPool")
_PASSED = frozenset((
    "Abs", "Add", "Cast", "CastLike", "Clip", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu",
    "Identity", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Relu", "Sigmoid", "Sqrt",
    "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""What the optimizer takes out where it changes nothing, or moves a Transpose through."""
_PAD_AXES = 18
"""The first opset in which a Pad may name its axes."""


def avoid_optimizer_faults(model: onnx.ModelProto) -> None:
    """Rewrites ``model``, in place, where a default session of ONNX Runtime would break it.

    Args:
        model: with bare custom operators. Shapes in its ``value_info`` spare rewrites where the
            operands of a product are known to be of one rank.
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
    found = set[str]()
    for graph in _graphs(whole):
        found |= {value.name for value in (*graph.input, *graph.initializer)}
        found |= {name for node in graph.node for name in node.output}
    return found


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto, opset: int, names: set[str]) -> None:
        self._graph = graph
        self._opset = opset
        self._names = names
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        described = (*graph.input, *graph.value_info, *graph.output)
        self._described = {value.name: value.type.tensor_type for value in described}
        self._pools = any(node.op_type in _POOLS for node in graph.node)
        self._transposed = set[str]()
        self._cast = set[str]()
        self._apart: dict[str, str] = {}

    def run(self) -> None:
        nodes = list[onnx.NodeProto]()
        for node in self._graph.node:
            nodes += self._kept_apart(node)
            nodes.append(node)
            self._look_through(node)
            if self._pools and node.op_type == "Pad" and len(node.input) < 4:
                self._name_axes(node)
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _look_through(self, node: onnx.NodeProto) -> None:
        if node.op_type in _PASSED and not node.domain:
            transposed = node.op_type == "Transpose" or not self._transposed.isdisjoint(node.input)
            cast = node.op_type in _CASTS or not self._cast.isdisjoint(node.input)
            self._transposed.update(node.output if transposed else ())
            self._cast.update(node.output if cast else ())

    def _is_swapped(self, node: onnx.NodeProto, name: str) -> bool:
        """Whether the optimizer may take a Transpose to ``node`` by way of its input ``name``."""
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

    def _kept_apart(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """What goes before ``node``: a Reshape of an input to the shape that it has already."""
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
        known = self._described.get(name)
        return int(known.elem_type if known is not None else TensorProto.UNDEFINED)

    def _rank(self, name: str) -> int | None:
        if name in self._weights:
            return len(self._weights[name].dims)
        known = self._described.get(name)
        return len(known.shape.dim) if known is not None and known.HasField("shape") else None
