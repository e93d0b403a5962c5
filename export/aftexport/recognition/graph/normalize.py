"""Normalization of a graph by the passes of onnx, onnx_ir and onnxscript, and removal of no-ops.

Exporters without optimization write nodes whose output equals their input, and a bias of zeros for
every convolution. A node is removed only if it has no effect at any size. A slice of the first
1,000 tokens has no effect in the probed runs but cuts longer documents, so its bounds must prove
that it cuts nothing.
"""

import logging
from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)
from onnxscript import optimizer

from aftexport.operators.domain import opset_of
from aftexport.recognition.graph.shape_probe import ProbedGraph

MIN_OPSET = 18
"""The first opset that the portable bodies of the operators support."""
TARGET_OPSET = 20
_MAX_SHARED_NUMBERS = 2**16
"""The most numbers of a constant that is compared with the others."""
_FIRST_OVERRIDABLE_IR = 4
"""The first IR version whose initializers among the inputs may be overridden."""
# It warns of each initializer that is an input or an output of the graph too.
logging.getLogger(DeduplicateInitializersPass.__module__).setLevel(logging.ERROR)


def normalize(model: onnx.ModelProto) -> ir.Model:
    """Return a copy with functions inlined, constants folded and common subexpressions merged.

    A model with an older opset than the portable bodies support is converted to a later opset. If
    the IR version requires each initializer among the inputs, those inputs are removed.
    """
    is_old = model.ir_version < _FIRST_OVERRIDABLE_IR
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    if opset_of(model) < MIN_OPSET:
        model = onnx.version_converter.convert_version(model, TARGET_OPSET)
    graph = ir.from_proto(model)
    if is_old:
        RemoveInitializersFromInputsPass()(graph)
    LiftConstantsToInitializersPass()(graph)
    optimizer.fold_constants(graph)
    LiftConstantsToInitializersPass()(graph)
    _remove_identities(graph)
    for step in (
        # Exporters write a constant once for each use, as the positions above and below a division.
        DeduplicateInitializersPass(_MAX_SHARED_NUMBERS),
        CommonSubexpressionEliminationPass(),
        RemoveUnusedNodesPass(),
        NameFixPass(),
    ):
        step(graph)
    return graph


def _remove_identities(model: ir.Model) -> None:
    """Remove nodes Identity, except where a graph needs one to hand on a value as its output."""
    # onnx_ir's pass also takes those by which a branch or a loop's body hands on an outer value.
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if node.op_type != "Identity" or node.domain != "" or node.inputs[0] is None:
            continue
        source, output, graph = node.inputs[0], node.outputs[0], node.graph
        assert graph is not None
        if output.is_graph_output():
            producer = source.producer()
            is_own = producer is not None and producer.graph is graph
            if not is_own or source.is_graph_output():
                continue
            source.name = output.name
        ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
        graph.remove(node, safe=True)


_UNBOUNDED = 2**31 - 1
"""The smallest end by which exporters mean that a slice takes everything."""
_CUTTING_OPERATORS = ("Pad", "Reshape", "Slice")
"""Operators that may cut or regroup documents that are longer than some number of tokens."""
_SIZE_OPERATORS = frozenset({
    "Add", "Cast", "Concat", "Gather", "Identity", "Mul", "Reshape", "Slice", "Squeeze", "Sub",
    "Unsqueeze",
})  # fmt: skip
"""Operators on sizes that act alike at all sizes, unlike a minimum or a remainder."""


def remove_no_ops(model: ir.Model, probed: ProbedGraph) -> set[ir.Node]:
    """Connect the readers of nodes without effect to the inputs of those nodes.

    Outputs of the graph keep their nodes.

    Return those without effect in all runs that may affect longer documents.
    """
    doubtful = set()
    for node in list(model.graph):
        if node.domain not in ("", "ai.onnx"):
            continue
        if node.op_type == "Conv" and len(node.inputs) > 2 and _is_zero(node.inputs[2], probed):
            node.replace_input_with(2, None)
        if node.op_type not in _NO_OPS:
            continue
        source, output = node.inputs[0], node.outputs[0]
        if source is None or not _looks_the_same(source, output, probed):
            continue
        if not _NO_OPS[node.op_type](node, probed):
            moves = any(
                len({*sizes}) > 1 for sizes in zip(*probed.shapes(source) or (), strict=True)
            )
            if moves and node.op_type in _CUTTING_OPERATORS:
                doubtful.add(node)
        elif not output.is_graph_output() and not any(o.uses() for o in node.outputs[1:]):
            output.replace_all_uses_with(source)
    RemoveUnusedNodesPass()(model)
    return doubtful


def _looks_the_same(source: ir.Value, output: ir.Value, probed: ProbedGraph) -> bool:
    shapes = probed.shapes(source)
    return (
        shapes is not None
        and shapes == probed.shapes(output)
        and probed.dtype(source) == probed.dtype(output)
    )


def _is_zero(value: ir.Value | None, probed: ProbedGraph) -> bool:
    array = probed.fixed_value(value)
    return array is not None and not array.any()


def _always(node: ir.Node, probed: ProbedGraph) -> bool:
    return True


def _has_one_input(node: ir.Node, probed: ProbedGraph) -> bool:
    return len(node.inputs) == 1


def _is_of_inference(node: ir.Node, probed: ProbedGraph) -> bool:
    training = node.inputs[2] if len(node.inputs) > 2 else None
    if training is None:
        return True
    return _is_zero(training, probed)


def _keeps_order(node: ir.Node, probed: ProbedGraph) -> bool:
    order = list(node.attributes.get_ints("perm", []))
    return bool(order) and order == sorted(order)


def _pads_nothing(node: ir.Node, probed: ProbedGraph) -> bool:
    return _is_zero(node.inputs[1], probed)


def _has_no_bounds(node: ir.Node, probed: ProbedGraph) -> bool:
    return all(bound is None for bound in node.inputs[1:]) and not node.attributes


def _reduces_nothing(node: ir.Node, probed: ProbedGraph) -> bool:
    axes = probed.constant(node.inputs[1]) if len(node.inputs) > 1 else np.empty(0)
    has_axes = "axes" in node.attributes or axes is None or axes.size > 0
    return not has_axes and node.attributes.get_int("noop_with_empty_axes", 0) == 1


def _has_its_shape(node: ir.Node, probed: ProbedGraph) -> bool:
    """Return whether a shape is computed only from sizes."""
    return len(node.inputs) < 2 or _is_of_sizes(node.inputs[1], probed)


def _takes_all(node: ir.Node, probed: ProbedGraph) -> bool:
    starts, ends, axes, steps = (
        node.inputs[i] if len(node.inputs) > i else None for i in (1, 2, 3, 4)
    )
    first, by = probed.fixed_value(starts), probed.fixed_value(steps)
    if first is None or first.any() or (steps is not None and (by is None or (by != 1).any())):
        return False
    last, along = probed.fixed_value(ends), probed.fixed_value(axes)
    if axes is not None and along is None:
        return False
    if last is None:
        # An end that only equals the size in these runs might cut longer documents.
        return _is_of_sizes(ends, probed)
    source = node.inputs[0]
    assert source is not None
    sizes = list(zip(*(probed.shapes(source) or ()), strict=True))
    cut = range(len(last)) if along is None else [int(axis) for axis in along.reshape(-1)]
    return all(
        end >= _UNBOUNDED or (len({*sizes[axis]}) == 1 and end >= sizes[axis][0])
        for axis, end in zip(cut, map(int, last.reshape(-1)), strict=True)
    )


def _is_of_sizes(value: ir.Value | None, probed: ProbedGraph) -> bool:
    """Return whether a value is computed from sizes and constants by sums and products."""
    pending, seen = [value], set[ir.Value | None]()
    while pending:
        made = pending.pop()
        if made is None or made in seen or probed.fixed_value(made) is not None:
            continue
        seen.add(made)
        node = made.producer()
        if node is None or node.op_type not in (*_SIZE_OPERATORS, "Shape", "Size"):
            return False
        if node.op_type not in ("Shape", "Size"):
            pending += node.inputs
    return True


_NO_OPS: dict[str, Callable[[ir.Node, ProbedGraph], bool]] = {
    "Cast": _always,
    "CastLike": _always,
    "Clip": _has_no_bounds,
    "Concat": _has_one_input,
    "Dropout": _is_of_inference,
    "Expand": _has_its_shape,
    "Flatten": _has_its_shape,
    "Identity": _always,
    "Max": _has_one_input,
    "Mean": _has_one_input,
    "Min": _has_one_input,
    "Pad": _pads_nothing,
    "ReduceSum": _reduces_nothing,
    "ReduceMean": _reduces_nothing,
    "Reshape": _has_its_shape,
    "Slice": _takes_all,
    "Split": _always,
    "Sum": _has_one_input,
    "Tile": _has_its_shape,
    "Transpose": _keeps_order,
}
"""For each operator, whether a node with equal shapes and types has equal values."""
