"""Rewrites of sigmoids that keep the digits of their smallest results.

ONNX Runtime's Sigmoid has an error of 6e-8 and is 0 for inputs below -18. This does not matter in a
gate. It does matter in ``log(sigmoid(x))`` and ``sigmoid(x) ** (1 / 16)``, which gated linear
attention uses, and in a weight that is divided by the sum of the weights.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

_PRODUCTS = frozenset(("Einsum", "Gemm", "MatMul"))
_PASSED = _PRODUCTS | frozenset((
    "Abs", "Add", "Cast", "Clip", "Concat", "CumSum", "Div", "Expand", "Flatten", "Gather",
    "Identity", "Max", "Min", "Mul", "Neg", "Pad", "ReduceL1", "ReduceL2", "ReduceMax",
    "ReduceMean", "ReduceMin", "ReduceSum", "Relu", "Reshape", "Slice", "Split", "Squeeze", "Sub",
    "Transpose", "Unsqueeze", "Where",
))  # fmt: skip
"""Operators that map small numbers to small numbers."""
_SENSITIVE = frozenset(("Log", "Pow", "Reciprocal", "ReduceLogSum", "ReduceProd", "Sqrt"))


def keep_small_sigmoids(model: onnx.ModelProto) -> None:
    """Rewrite each Sigmoid of the main graph that a logarithm, power or divisor reads, in place.

    The logarithm of a Sigmoid becomes a Softplus, which does not underflow.
    """
    _Rewriter(model.graph).run()


class _Rewriter:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._sigmoids = {n.output[0]: n for n in graph.node if n.op_type == "Sigmoid"}
        self._constants = {initializer.name: initializer for initializer in graph.initializer}
        self._consumers = defaultdict[str, list[onnx.NodeProto]](list)
        for node in graph.node if self._sigmoids else ():
            for name in node.input:
                self._consumers[name].append(node)
        self._names = {name for node in graph.node for name in node.output}
        self._names |= {value.name for value in (*graph.input, *graph.initializer)}

    def run(self) -> None:
        changed = {name for name in self._sigmoids if self._is_sensitive(name)}
        if not changed:
            return
        nodes = [new for node in self._graph.node for new in self._rewritten(node, changed)]
        del self._graph.node[:]
        self._graph.node.extend(nodes)

    def _is_sensitive(self, name: str) -> bool:
        """Return whether a small number in ``name`` reaches a node that amplifies it."""
        seen, left = {name}, [name]
        while left:
            value = left.pop()
            for node in self._consumers[value]:
                place = list(node.input).index(value)
                if (node.op_type in _SENSITIVE and not place) or (node.op_type == "Div" and place):
                    return True
                if node.op_type in _PASSED and not self._is_layer(node):
                    left += [output for output in node.output if output not in seen]
                    seen.update(node.output)
        return False

    def _is_layer(self, node: onnx.NodeProto) -> bool:
        """Return whether ``node`` multiplies by constants of both signs.

        A gate before such a layer keeps its Sigmoid. Constants of one sign, such as ones, only sum.
        """
        factors = node.input[:2] if node.op_type in _PRODUCTS else ()
        weights = [self._constants[name] for name in factors if name in self._constants]
        return any(_has_both_signs(onnx.numpy_helper.to_array(weight)) for weight in weights)

    def _rewritten(self, node: onnx.NodeProto, changed: set[str]) -> Iterator[onnx.NodeProto]:
        make = onnx.helper.make_node
        if node.op_type == "Log" and node.input[0] in changed:
            x, result = self._sigmoids[node.input[0]].input[0], node.output[0]
            minus, more = self._fresh(f"val_minus_{result}"), self._fresh(f"val_more_{result}")
            yield make("Neg", [x], [minus])
            yield make("Softplus", [minus], [more])
            yield make("Neg", [more], [result])
        elif node.op_type == "Sigmoid" and node.output[0] in changed:
            x, result = node.input[0], node.output[0]
            one, typed, minus, power, sum_ = (
                self._fresh(f"val_{part}_{result}")
                for part in ("one", "typed", "minus", "power", "sum")
            )
            # The type of x may be unknown here.
            self._graph.initializer.append(
                onnx.numpy_helper.from_array(np.ones((), np.float32), one)
            )
            yield make("CastLike", [one, x], [typed])
            yield make("Neg", [x], [minus])
            yield make("Exp", [minus], [power])
            yield make("Add", [power, typed], [sum_])
            yield make("Reciprocal", [sum_], [result])
        else:
            yield node

    def _fresh(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name


def _has_both_signs(array: NDArray[Any]) -> bool:
    return bool((array < 0).any() and (array > 0).any())
