"""The nodes that read the shape of a convolution's result, which its input has too."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering.nodes import NewNodes
from aftexport.recognition.graph.convolution_rows import rank_of, slice_rows
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
    shapes = _shapes_read(convolution, path, set(), probed)
    if shapes is None:
        return False
    for node, counts in shapes.items():
        for value, count in counts.items():
            new = NewNodes(graph, str(value.name))
            value.replace_all_uses_with(new.constant(count))
        node.replace_input_with(0, convolution.inputs[0])
    return True


def can_leave(
    convolution: ir.Node, path: set[ir.Node], replaced: set[ir.Node], probed: ProbedGraph
) -> bool:
    """Return whether ``redirect_sizes`` will let nodes leave a 1x1 convolution.

    Args:
        convolution: the convolution.
        path: the nodes that are to leave it.
        replaced: the nodes that the graph is to lose.
        probed: the probed values of the graph.
    """
    return _shapes_read(convolution, path, replaced, probed) is not None


def has_sizes_of(image: ir.Value | None, value: ir.Value, probed: ProbedGraph) -> bool:
    """Return whether a value has the batch, the height and the width of an image."""
    if image is None or not probed.has(image) or not probed.has(value):
        return False
    shapes = probed.shapes(image) or [], probed.shapes(value) or []
    return all(a[0] == b[0] and a[2:] == b[2:] for a, b in zip(*shapes, strict=True))


def _shapes_read(
    convolution: ir.Node, path: set[ir.Node], replaced: set[ir.Node], probed: ProbedGraph
) -> dict[ir.Node, _Constants] | None:
    """Return the shapes of rows on a path that are read, with the counts of channels from each.

    Returns:
        The nodes that read a shape, None if other nodes read the rows or their channels.
    """
    found: dict[ir.Node, _Constants] = {}
    pending = [convolution.outputs[0]]
    while pending:
        value = pending.pop()
        if value.is_graph_output():
            return None
        for user, _ in value.uses():
            is_slice = all(slice_rows(user, output, probed) is not None for output in user.outputs)
            if user in replaced:
                continue
            if user.op_type == "Shape" and has_sizes_of(convolution.inputs[0], value, probed):
                counts = _channel_counts(user, replaced, probed)
                if counts is None:
                    return None
                found[user] = counts
            elif user not in path and not is_slice:
                return None
            elif user.op_type != "Transpose":  # its result is what the operator reads
                own = [o for o in user.outputs if any(u in path for u, _ in o.uses())]
                pending += own if is_slice else user.outputs
    return found


def _channel_counts(
    node: ir.Node, replaced: set[ir.Node], probed: ProbedGraph
) -> _Constants | None:
    """Return the numbers of channels that are read from a shape; None for other readers of it."""
    rank = rank_of(node.inputs[0], probed)
    start, end = (node.attributes.get_int(n, d) for n, d in (("start", 0), ("end", rank)))
    places = np.arange(rank)[start:end]
    if 1 not in places:
        return {}
    if node.outputs[0].is_graph_output():
        return None
    found: dict[ir.Value, NDArray[np.generic]] = {}
    for user, _ in node.outputs[0].uses():
        if user in replaced:
            continue
        taken = _places_taken(user, places, probed)
        if taken is None:
            return None
        if 1 in taken:
            count = probed.fixed_value(user.outputs[0])
            if count is None or user.outputs[0].is_graph_output():
                return None
            found[user.outputs[0]] = count
    return found


def _places_taken(
    node: ir.Node, places: NDArray[np.int64], probed: ProbedGraph
) -> NDArray[np.int64] | None:
    """Return the places of a shape that a Gather or a Slice takes; None for other nodes."""
    numbers = [probed.fixed_value(value) for value in node.inputs[1:]]
    if node.op_type not in ("Gather", "Slice") or any(n is None or n.size != 1 for n in numbers):
        return None
    first, *others = (int(np.reshape(n, ())) for n in numbers)  # type: ignore[arg-type]
    if node.op_type == "Gather":
        return places[[first]]
    end, step = others[0], others[2] if len(others) > 2 else 1  # the axis is the only one
    return places[first:end:step]
