"""Questions about the nodes of a graph, new nodes, and replacement of several nodes by one."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering.graph_values import free_name, value_names
from aftexport.operators.domain import DOMAIN, PLUGIN_ATTRIBUTES


def replace(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, float | str],
    nodes: list[ir.Node],
) -> None:
    """Replace ``nodes`` by one node, at the place of the last."""
    last = nodes[-1]
    fused = custom_node(op_type, inputs, attributes)
    last.graph.insert_after(last, fused)  # type: ignore[union-attr]
    take_place(last.outputs[0], fused.outputs[0])
    remove(nodes)


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Replace ``old`` by ``new`` in all readers, under the name, type and shape of ``old``."""
    new.type, new.shape = old.type, old.shape
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name = name


def custom_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, float | str],
    num_outputs: int = 1,
) -> ir.Node:
    """Return a node of our domain."""
    all_attributes = {**attributes, **PLUGIN_ATTRIBUTES}
    return ir.node(op_type, inputs, all_attributes, domain=DOMAIN, num_outputs=num_outputs)


def remove(nodes: list[ir.Node]) -> None:
    """Remove nodes whose outputs have no readers outside ``nodes``."""
    graph = nodes[0].graph
    assert graph is not None
    graph.remove(nodes, safe=True)


def are_closed(nodes: Sequence[ir.Node]) -> bool:
    """Return whether only ``nodes`` read the outputs of all of them but the last."""
    inside = set(nodes)
    values = [value for node in nodes[:-1] for value in node.outputs]
    return not any(
        value.is_graph_output() or any(user not in inside for user, _ in value.uses())
        for value in values
    )


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the only reader of ``value``; None unless it is a single ``op_type``."""
    users = [user for user, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output() or users[0].op_type != op_type:
        return None
    return users[0]


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """Return the other input of a ``node`` with two inputs, beside ``value``."""
    first, second = node.inputs
    return second if first is value else first


def rank(value: ir.Value) -> int | None:
    """Return the rank of an initializer; None for computed values."""
    return len(value.const_value.shape) if value.const_value is not None else None


def constant(value: ir.Value) -> NDArray[np.generic]:
    """Return the numbers of an initializer."""
    assert value.const_value is not None
    return value.const_value.numpy()


def add_constant(model: ir.Model, name: str, array: NDArray[np.generic]) -> ir.Value:
    """Add an initializer to a graph and return its value."""
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value


class NewNodes:
    """The nodes that are added to a graph at one place.

    ``taken`` has the names of the whole model, and gets the new ones; None for those of the graph.
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
