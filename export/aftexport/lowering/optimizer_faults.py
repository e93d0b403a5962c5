"""Rewrites of graphs that ONNX Runtime's own optimizer breaks, for sessions without options.

fault                  versions      effect
MatmulTransposeFusion  1.24 to 1.31  swaps Transpose and Cast before a MatMul of another rank,
                                     and leaves nodes without a schema: NchwcTransformer, the
                                     next step, crashes (microsoft/onnxruntime issue 28392)
MatmulTransposeFusion  to 1.30       makes a FusedMatMul of float64, which has no kernel (28136)
PadFusion              1.17 to 1.31  turns the zeros of a Pad into padding of a pooling: a maximum
                                     ignores padding, and padding above the window is refused
"""

import numpy as np
import onnx_ir as ir

from aftexport.lowering.graph_values import value_names
from aftexport.lowering.nodes import NewNodes
from aftexport.operators.domain import DOMAIN

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
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


def avoid_optimizer_faults(model: ir.Model) -> None:
    """Rewrite the parts of ``model`` that a default session of ONNX Runtime breaks, in place.

    Its custom operators are bare. Known shapes of intermediate values avoid rewrites of products
    whose operands have equal ranks.
    """
    taken = value_names(model.graph)
    for graph in (model.graph, *model.graph.subgraphs()):
        _Rewriter(graph, model.graph.opset_imports.get("", 0), taken).run()


class _Rewriter:
    def __init__(self, graph: ir.Graph, opset: int, taken: set[str]) -> None:
        self._graph = graph
        self._opset = opset
        self._taken = taken
        self._has_pools = any(node.op_type in _POOLS for node in graph)
        self._transposed = set[ir.Value]()
        self._cast = set[ir.Value]()
        self._apart: dict[ir.Value, ir.Value] = {}

    def run(self) -> None:
        for node in tuple(self._graph):
            self._keep_apart(node)
            self._look_through(node)
            if self._has_pools and node.op_type == "Pad" and len(node.inputs) < 4:
                self._name_axes(node)

    def _look_through(self, node: ir.Node) -> None:
        if node.op_type in _PASSED and not node.domain:
            operands = {value for value in node.inputs if value is not None}
            is_transpose = node.op_type == "Transpose"
            is_transposed = is_transpose or not self._transposed.isdisjoint(operands)
            is_cast = node.op_type in _CASTS or not self._cast.isdisjoint(operands)
            self._transposed.update(node.outputs if is_transposed else ())
            self._cast.update(node.outputs if is_cast else ())

    def _is_swapped(self, node: ir.Node, value: ir.Value) -> bool:
        """Return whether the optimizer may move a Transpose to ``node`` through an input."""
        if value not in self._transposed or (node.op_type != "MatMul" and node.domain != DOMAIN):
            return False
        elements = {None if other is None else other.dtype for other in node.inputs}
        if ir.DataType.DOUBLE in elements:
            return True
        ranks = {_rank(other) for other in node.inputs}
        if _rank(value) == 2 or (
            node.op_type == "MatMul" and len(ranks) == 1 and None not in ranks
        ):
            return False
        is_narrow = not elements.isdisjoint(_NARROW) or elements == {None}
        return is_narrow or value in self._cast

    def _keep_apart(self, node: ir.Node) -> None:
        """Put a Reshape to the same shape, which stops the optimizer, before inputs of ``node``."""
        for place, value in enumerate(node.inputs):
            if value is None or not self._is_swapped(node, value):
                continue
            if value not in self._apart:
                new = NewNodes(self._graph, "kept", self._taken)
                self._apart[value] = new.add("Reshape", value, new.add("Shape", value))
                self._graph.insert_before(node, new.nodes)
            node.replace_input_with(place, self._apart[value])

    def _name_axes(self, node: ir.Node) -> None:
        padded, pads = node.inputs[:2]
        rank = _rank(padded)
        if rank is None and pads is not None and pads.const_value is not None:
            rank = pads.const_value.size // 2
        is_constant = node.attributes.get_string("mode", "constant") == "constant"
        if not is_constant or rank is None or self._opset < _PAD_AXES:
            return
        axes = NewNodes(self._graph, "axes", self._taken).constant(np.arange(rank))
        node.resize_inputs(4)
        node.replace_input_with(3, axes)


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)
