"""Reductions in a graph over the tokens of a document, or over the channels of a token."""

from collections.abc import Mapping

import onnx_ir as ir

from aftexport.bundle.chunked_plan import Pooling
from aftexport.lowering.graph_values import Array, names_of


def pooling(node: ir.Node, constants: Mapping[str, Array]) -> Pooling | None:
    """Return a node's pooling over the tokens, ``sum``, ``max`` or ``first``; None for none."""
    if node.op_type == "Gather":
        index = constants.get(names_of(node.inputs)[1])
        axis = node.attributes.get_int("axis", 0)
        return "first" if axis == 1 and index is not None and index.tolist() in (0, [0]) else None
    if is_sum_over_tokens(node, constants):
        return "sum"
    return "max" if node.op_type == "ReduceMax" and _reduces_tokens(node, constants) else None


def is_sum_over_tokens(node: ir.Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node is a ReduceSum over axis 1 only."""
    return node.op_type == "ReduceSum" and _reduces_tokens(node, constants)


def is_reduction_over_tokens(node: ir.Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node is a ReduceSum or ReduceMean over axis 1 only."""
    return node.op_type in ("ReduceSum", "ReduceMean") and _reduces_tokens(node, constants)


def is_reduction_over_channels(
    node: ir.Node, constants: Mapping[str, Array], rank: int = 3
) -> bool:
    """Return whether a node reduces only the last axis of ``rank`` axes, and keeps it as 1."""
    keeps_axis = node.attributes.get_int("keepdims", 1) == 1
    is_reduction = node.op_type.startswith("Reduce") and keeps_axis
    return is_reduction and _axes(node, constants) in ([-1], [rank - 1])


def _reduces_tokens(node: ir.Node, constants: Mapping[str, Array]) -> bool:
    return _axes(node, constants) == [1]


def _axes(node: ir.Node, constants: Mapping[str, Array]) -> list[int] | None:
    axes = constants.get(names_of(node.inputs)[1]) if len(node.inputs) > 1 else None
    return axes.tolist() if axes is not None else None
