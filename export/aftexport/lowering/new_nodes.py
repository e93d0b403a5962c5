"""New nodes of a graph, in an order of execution, with names of their own."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering.nodes import remove, take_place
from aftexport.lowering.value_names import free_name, value_names


class NewNodes:
    """The nodes that are added to a graph at one place.

    Args:
        graph: the graph, which gets the constants at once.
        prefix: the start of all new names.
        taken: the names of the values of the whole model, which get the new ones; None for those
            of ``graph``.
    """

    def __init__(self, graph: ir.Graph, prefix: str, taken: set[str] | None = None) -> None:
        self._graph = graph
        self._prefix = prefix
        self._taken = value_names(graph) if taken is None else taken
        self.nodes: list[ir.Node] = []

    def add(
        self, op_type: str, *inputs: ir.Value | None, **attributes: int | Sequence[int]
    ) -> ir.Value:
        """Return the output of a new standard node."""
        node = ir.node(op_type, inputs, attributes)
        return self.append(node)[0]

    def append(self, node: ir.Node) -> Sequence[ir.Value]:
        """Append a node, and return its outputs with names."""
        self.nodes.append(node)
        for output in node.outputs:
            output.name = self._name(node.op_type.lower())
        return node.outputs

    def constant(self, array: NDArray[np.generic] | Sequence[int]) -> ir.Value:
        """Return a new constant; integers become int64."""
        numbers = np.asarray(array)
        if numbers.dtype.kind == "i":
            numbers = numbers.astype(np.int64)
        name = self._name("constant")
        value = ir.val(name, const_value=ir.tensor(numbers, name=name))
        self._graph.register_initializer(value)
        return value

    def cast(
        self, value: ir.Value, have: np.dtype[np.generic], to: np.dtype[np.generic]
    ) -> ir.Value:
        """Return a value in another type, or itself if it has the type."""
        if have == to:
            return value
        return self.add("Cast", value, to=int(ir.DataType.from_numpy(to)))

    def replace(self, node: ir.Node, result: ir.Value) -> None:
        """Put the nodes in the place of a node, whose only output becomes ``result``."""
        self._graph.insert_before(node, self.nodes)
        take_place(node.outputs[0], result)
        remove([node])

    def _name(self, stem: str) -> str:
        name = free_name(f"{self._prefix}_{stem}", self._taken)
        self._taken.add(name)
        return name
