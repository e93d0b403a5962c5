"""Transposes moved behind the operators that read them, until a transpose back undoes them.

A model may norm the heads of its queries as ``[B, H, T, C]``, or gate channels as ``[B, C, T]``.
These operators compute the same numbers with the tokens at axis 1, where the chunks need them.
It is apart from ``softmaxes``, because it knows nothing of attention.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from aftexport.lowering.graph_values import ELEMENTWISE, Array, constants_of
from aftexport.lowering.nodes import NewNodes, remove

_Perm = tuple[int, ...]
_WITH_AXIS = frozenset(("Concat", "LogSoftmax", "Softmax", "Split"))
"""Operators along the axis of an attribute."""
_WITH_AXES = {"ReduceMax": 1, "ReduceMean": 1, "ReduceMin": 1, "ReduceSum": 1, "Slice": 3}
"""Operators along constant axes, with the place of the input that has them."""


def move_transposes(graph: ir.Graph) -> None:
    """Move each Transpose behind operators that do not mix its axes; two inverse ones go away."""
    constants = constants_of(graph)
    for node in tuple(graph):
        perms = {perm for value in node.inputs if (perm := _perm_of(value)) is not None}
        if node.domain or len(perms) != 1:
            continue
        (perm,) = perms
        if node.op_type == "Transpose":
            _join(graph, node, perm)
        elif (inputs := _Moved(node, perm, constants).inputs()) is not None:
            _move(graph, node, perm, inputs)


def _perm_of(value: ir.Value | None) -> _Perm | None:
    """Return the order of axes of the Transpose that computes a value; None if none does."""
    node = None if value is None else value.producer()
    return None if node is None else _order(node)


def _order(node: ir.Node) -> _Perm | None:
    if node.domain or node.op_type != "Transpose" or "perm" not in node.attributes:
        return None
    return tuple(node.attributes["perm"].as_ints())


def _before(value: ir.Value) -> ir.Value:
    """Return the value of which another is a Transpose."""
    node = value.producer()
    assert node is not None  # the callers check this
    before = node.inputs[0]
    assert before is not None  # a Transpose has an input
    return before


def _join(graph: ir.Graph, node: ir.Node, first: _Perm) -> None:
    """Replace a Transpose of a Transpose by one, or by none."""
    (value,), second = node.inputs, _order(node)
    if value is None or second is None:
        return
    before, joined = _before(value), [first[axis] for axis in second]
    if joined == sorted(joined) and not node.outputs[0].is_graph_output():
        node.outputs[0].replace_all_uses_with(before)
        remove([node])
        return
    new = NewNodes(graph, "moved")
    new.replace(node, new.add("Transpose", before, perm=joined))


class _Moved:
    """An operator whose inputs are transposed, and its inputs if it came before the Transpose."""

    def __init__(self, node: ir.Node, perm: _Perm, constants: Mapping[str, Array]) -> None:
        self._node = node
        self._perm = perm
        self._constants = constants

    def inputs(self) -> list[ir.Value | Array | None] | None:
        """Return the inputs; None if the operator cannot come first."""
        node = self._node
        if node.op_type in ELEMENTWISE:
            found = [self._operand(value) for value in node.inputs]
        elif node.op_type in _WITH_AXIS:
            found = self._along_axis()
        elif node.op_type in _WITH_AXES:
            found = self._along_axes(_WITH_AXES[node.op_type])
        else:
            return None
        is_known = all(
            ours is not None or given is None
            for ours, given in zip(found, node.inputs, strict=True)
        )
        return found if is_known else None

    def _operand(self, value: ir.Value | None) -> ir.Value | Array | None:
        """Return an operand of an elementwise operator with the axes before the Transpose."""
        if value is None:
            return None
        if _perm_of(value) is not None:
            return _before(value)
        constant = self._constants.get(str(value.name))
        rank = len(self._perm)
        if constant is None or constant.ndim > rank:
            return None
        whole = constant.reshape((1,) * (rank - constant.ndim) + constant.shape)
        if all(size == 1 or self._perm[axis] == axis for axis, size in enumerate(whole.shape)):
            return value
        return whole.transpose(np.argsort(self._perm))

    def _along_axis(self) -> list[ir.Value | Array | None]:
        first, *others = self._node.inputs
        if self._node.op_type == "Concat":
            return [_moved_only(value) for value in self._node.inputs]
        return [_moved_only(first), *others]

    def _along_axes(self, place: int) -> list[ir.Value | Array | None]:
        node = self._node
        found: list[ir.Value | Array | None] = [_moved_only(node.inputs[0]), *node.inputs[1:]]
        given = node.inputs[place] if len(node.inputs) > place else None
        axes = None if given is None else self._constants.get(str(given.name))
        keeps_axes = node.op_type == "Slice" or node.attributes.get_int("keepdims", 1) == 1
        if axes is None or not keeps_axes:
            return [None] * len(found)
        found[place] = np.asarray([self._perm[int(axis)] for axis in axes.reshape(-1)])
        return found


def _moved_only(value: ir.Value | None) -> ir.Value | None:
    return None if _perm_of(value) is None or value is None else _before(value)


def _move(
    graph: ir.Graph, node: ir.Node, perm: _Perm, inputs: Sequence[ir.Value | Array | None]
) -> None:
    """Put an operator with other inputs before the Transpose."""
    new = NewNodes(graph, "moved")
    given = [new.constant(x) if isinstance(x, np.ndarray) else x for x in inputs]
    attributes = dict(node.attributes)
    if node.op_type in _WITH_AXIS:
        axis = perm[node.attributes.get_int("axis", 0 if node.op_type == "Split" else -1)]
        attributes["axis"] = ir.AttrInt64("axis", axis)
    count = len(node.outputs)
    moved = ir.Node("", node.op_type, given, attributes.values(), num_outputs=count)
    for old, value in zip(node.outputs, new.append(moved), strict=True):
        value.type = old.type
        if old.shape is not None:
            value.shape = ir.Shape([old.shape[place] for place in np.argsort(perm)])
        new.add("Transpose", value, perm=list(perm))
    graph.insert_before(node, new.nodes)
    for old, after in zip(node.outputs, new.nodes[1:], strict=True):
        result = after.outputs[0]
        name, result.type, result.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        result.name = name
    remove([node])
