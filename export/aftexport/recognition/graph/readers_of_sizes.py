"""The nodes that read the shape of a convolution's result, which its input has too."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.passes.standard_recurrence.new_nodes import NewNodes
from aftexport.recognition.graph.pointwise import slice_rows
from aftexport.recognition.graph.shape_probe import ProbedGraph

_Constants = Mapping[ir.Value, NDArray[np.generic]]


def redirect_sizes(
    graph: ir.Graph, convolution: ir.Node, path: set[ir.Node], probed: ProbedGraph
) -> bool:
    """Let shapes of the rows of a 1x1 convolution be read from its input.

    Args:
        graph: the graph.
        convolution: the convolution.
        path: the nodes that are to leave it.
        probed: the probed values of the graph.

    Returns:
        Whether the nodes can leave it: other nodes read other slices of its channels only.
    """
    shapes = shapes_read(convolution, path, set(), probed)
    constants = [_channel_counts(node, probed) for node in shapes or ()]
    if shapes is None or any(found is None for found in constants):
        return False
    for node, found in zip(shapes, constants, strict=True):
        for value, count in (found or {}).items():
            new = NewNodes(graph, str(value.name))
            value.replace_all_uses_with(new.constant(count))
        node.replace_input_with(0, convolution.inputs[0])
    return True


def shapes_read(
    convolution: ir.Node, path: set[ir.Node], replaced: set[ir.Node], probed: ProbedGraph
) -> list[ir.Node] | None:
    """Return the nodes that read the shape of rows on a path, None if others read the rows.

    Args:
        convolution: the convolution.
        path: the nodes that are to leave it.
        replaced: the nodes that the graph is to lose.
        probed: the probed values of the graph.
    """
    found: list[ir.Node] = []
    pending = [convolution.outputs[0]]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return None
        for user, _ in value.uses():
            is_slice = all(slice_rows(user, output, probed) is not None for output in user.outputs)
            if user in replaced:
                continue
            if user.op_type == "Shape" and _has_sizes_of(convolution.inputs[0], value, probed):
                found.append(user)
            elif user not in path and not is_slice:
                return None
            elif user.op_type != "Transpose":  # its result is what the operator reads
                own = [o for o in user.outputs if any(u in path for u, _ in o.uses())]
                pending += own if is_slice else user.outputs
    return found


def _has_sizes_of(image: ir.Value | None, value: ir.Value, probed: ProbedGraph) -> bool:
    """Return whether a value has the batch, the height and the width of an image."""
    if image is None or not probed.has(value):
        return False
    shapes = probed.shapes(image) or [], probed.shapes(value) or []
    return all(a[0] == b[0] and a[2:] == b[2:] for a, b in zip(*shapes, strict=True))


def _channel_counts(node: ir.Node, probed: ProbedGraph) -> _Constants | None:
    """Return the numbers of channels that are read from a shape; None for other readers of it."""
    rank = _rank(node.inputs[0], probed)
    start, end = (node.attributes.get_int(n, d) for n, d in (("start", 0), ("end", rank)))
    places = range(rank)[start:end]
    if 1 not in places:
        return {}
    if node.outputs[0].is_graph_output():
        return None
    found: dict[ir.Value, NDArray[np.generic]] = {}
    for user, _ in node.outputs[0].uses():
        place = probed.fixed_value(user.inputs[1]) if user.op_type == "Gather" else None
        if place is None or place.size != 1:
            return None
        if places[int(place.reshape(()))] == 1:
            count = probed.fixed_value(user.outputs[0])
            if count is None or user.outputs[0].is_graph_output():
                return None
            found[user.outputs[0]] = count
    return found


def _rank(value: ir.Value | None, probed: ProbedGraph) -> int:
    shapes = probed.shapes(value) if value is not None and probed.has(value) else None
    return len(shapes[0]) if shapes else 0
