"""Tensors ``[B, C, T]`` that are rows of a 1x1 convolution, through layouts and functions.

Nodes that read the shape of the convolution's result read it from the input instead.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering.nodes import NewNodes
from aftexport.recognition.graph.shape_probe import ProbedGraph

Rows = NDArray[np.int64]
LAYOUTS = frozenset(("Flatten", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators that keep the order of numbers."""
_MAPS = frozenset(("Abs", "Elu", "Exp", "LeakyRelu", "Neg", "Relu", "Sigmoid", "Softplus", "Tanh"))
"""Functions of one number."""
_MAPS_WITH_NUMBERS = frozenset(("Add", "Clip", "Div", "Max", "Min", "Mul", "Pow", "Sub"))
"""Functions of one number whose other inputs are constants."""
SEQUENCE_RANK = 3
"""The rank of ``[B, C, T]``; images have more dims."""


@dataclass
class ConvolutionRows:
    """The rows of a convolution that are a tensor ``[B, C, T]``."""

    convolution: ir.Node
    rows: Rows  # its output channels, in the order of the tensor's channels
    # Functions of one number after it, the last first.
    maps: list[ir.Node] = field(default_factory=list)
    # All nodes between the convolution and the tensor.
    path: list[ir.Node] = field(default_factory=list)

    @property
    def image(self) -> ir.Value:
        """The input of the convolution."""
        image = self.convolution.inputs[0]
        assert image is not None
        return image


def is_pointwise(node: ir.Node, probed: ProbedGraph) -> bool:
    """Return whether a node is a convolution of one pixel with constant weights."""
    if node.op_type != "Conv" or node.domain not in ("", "ai.onnx"):
        return False
    weight, *bias = (probed.constant(value) for value in node.inputs[1:] if value is not None)
    attributes = node.attributes
    ones = [*attributes.get_ints("strides", [1]), attributes.get_int("group", 1)]
    return (
        weight is not None
        and all(b is not None for b in bias)
        and {*weight.shape[2:]} == {1}
        and {*ones} == {1}
        and not any(attributes.get_ints("pads", [0]))
    )


def channel_dims(value: ir.Value, channels: int, probed: ProbedGraph) -> tuple[int, ...] | None:
    """Return the fixed dims after the batch that together are the channels, None without such."""
    shapes = probed.shapes(value)
    if not shapes:
        return None
    products = list(accumulate(shapes[0][1:], lambda a, b: a * b))
    if channels not in products:
        return None
    dims = shapes[0][1 : 2 + products.index(channels)]
    return dims if all(shape[1 : 1 + len(dims)] == dims for shape in shapes) else None


def convolution_rows(value: ir.Value, probed: ProbedGraph) -> ConvolutionRows | None:
    """Return a tensor ``[B, C, T]`` as rows of a convolution, None if it is computed otherwise."""
    channels = channels_of(value, probed)
    if channels is None:
        return None
    found: list[ir.Node] = []
    maps: list[ir.Node] = []
    rows = np.arange(channels)
    while (node := value.producer()) is not None:
        if is_pointwise(node, probed):
            # Otherwise dims of the image are among the channels.
            is_whole = channel_dims(value, channels, probed) == (channels,)
            return ConvolutionRows(node, rows, maps, found) if is_whole else None
        source = node.inputs[0]
        if source is None or not probed.has(source):
            return None
        dims = _dims_before(node, value, channels, probed)
        if dims is None:
            return None
        if node.op_type in _TAKEN:
            taken = _TAKEN[node.op_type](node, value, dims, probed)
            if taken is None:
                return None
            rows = taken.reshape(-1)[rows]
        elif node.op_type not in LAYOUTS:
            maps.append(node)
        found.append(node)
        value, channels = source, int(np.prod(dims))
    return None


def slice_rows(node: ir.Node, output: ir.Value, probed: ProbedGraph) -> Rows | None:
    """Return the channels of an image that an output of a node is, None if it is another node."""
    source = node.inputs[0] if node.op_type in ("Slice", "Split") else None
    shapes = probed.shapes(source)
    if not shapes or not probed.has(output) or _axis(node, probed) != 1:
        return None
    return _TAKEN[node.op_type](node, output, shapes[0][1:2], probed)


def rank_of(value: ir.Value | None, probed: ProbedGraph) -> int:
    """Return the number of dims of a value, 0 if the graph did not have it when it was probed."""
    shapes = probed.shapes(value)
    return len(shapes[0]) if shapes else 0


def channels_of(value: ir.Value, probed: ProbedGraph) -> int | None:
    """Return the number of channels of ``[B, C, T]``, which may be a Reshape without a shape."""
    if (shapes := probed.shapes(value)) is not None:
        sizes = {shape[1] for shape in shapes if len(shape) == SEQUENCE_RANK}
        return sizes.pop() if len(sizes) == 1 else None
    node = value.producer()
    if node is None or node.op_type != "Reshape":
        return None
    shape = probed.constant(node.inputs[1])
    if shape is None or shape.size != SEQUENCE_RANK or shape[1] <= 0:
        return None
    batch, channels = (int(size) for size in shape[:2])
    return channels if batch in (0, _fixed_batch(node.inputs[0], probed)) else None


def _fixed_batch(value: ir.Value | None, probed: ProbedGraph) -> int | None:
    """Return the first dim of a value if it is the same in all runs, None otherwise."""
    shapes = probed.shapes(value)
    sizes = {shape[:1] for shape in shapes or ()}
    return next(iter(sizes.pop()), None) if len(sizes) == 1 else None


def _dims_before(
    node: ir.Node, value: ir.Value, channels: int, probed: ProbedGraph
) -> tuple[int, ...] | None:
    """Return the dims of channels of the first input of a node; None if it mixes them."""
    source = node.inputs[0]
    assert source is not None
    if node.op_type in LAYOUTS:
        return _of_same_batch(source, value, channel_dims(source, channels, probed), probed)
    dims = channel_dims(value, channels, probed)
    if dims is None:
        return None
    if node.op_type in _TAKEN:
        axis = _axis(node, probed)
        if axis is None or not 1 <= axis <= len(dims) + (node.op_type == "Gather"):
            return None
        count = len(dims) + (node.op_type == "Gather")
        shapes = probed.shapes(source) or []
        found = {shape[1 : 1 + count] for shape in shapes}
        return found.pop() if len(found) == 1 else None
    if node.op_type in _MAPS:
        return dims
    others = [probed.fixed_value(v) for v in node.inputs[1:] if v is not None]
    if node.op_type in _MAPS_WITH_NUMBERS and all(o is not None and o.size == 1 for o in others):
        return dims
    return None


def _of_same_batch(
    source: ir.Value, value: ir.Value, dims: tuple[int, ...] | None, probed: ProbedGraph
) -> tuple[int, ...] | None:
    if not probed.has(value):
        return dims  # a Reshape that keeps its first dim
    pairs = zip(probed.shapes(source) or [], probed.shapes(value) or [], strict=True)
    return dims if all(before[0] == after[0] for before, after in pairs) else None


def _axis(node: ir.Node, probed: ProbedGraph) -> int | None:
    shapes = probed.shapes(node.inputs[0])
    if not shapes:
        return None
    axis = node.attributes.get_int("axis", 0)
    if node.op_type == "Slice":
        axes = probed.fixed_value(node.inputs[3]) if len(node.inputs) > 3 else None
        if axes is None or axes.size != 1:
            return None
        axis = int(axes.reshape(()))
    return axis % len(shapes[0])


def _sliced(
    node: ir.Node, _: ir.Value, dims: Sequence[int], probed: ProbedGraph
) -> NDArray[np.int64] | None:
    axis = _axis(node, probed)
    bounds = [probed.fixed_value(v) for v in node.inputs[1:3]]
    step = probed.fixed_value(node.inputs[4]) if len(node.inputs) > 4 else np.ones(1)
    if axis is None or step is None or any(b is None or b.size != 1 for b in bounds):
        return None
    start, end, by = (int(np.reshape(n, ())) for n in (*bounds, step))  # type: ignore[arg-type]
    places = range(dims[axis - 1])[start:end:by]
    return _indices(dims).take(np.array(places), axis=axis - 1)


def _gathered(
    node: ir.Node, _: ir.Value, dims: Sequence[int], probed: ProbedGraph
) -> NDArray[np.int64] | None:
    axis, place = _axis(node, probed), probed.fixed_value(node.inputs[1])
    if axis is None or place is None or place.ndim:
        return None
    return np.take(_indices(dims), np.array(int(place)), axis=axis - 1)


def _split(
    node: ir.Node, value: ir.Value, dims: Sequence[int], probed: ProbedGraph
) -> NDArray[np.int64] | None:
    axis = _axis(node, probed)
    if axis is None:
        return None
    sizes = [(probed.shapes(output) or [()])[0][axis] for output in node.outputs]
    place = list(node.outputs).index(value)
    start = sum(sizes[:place])
    return _indices(dims).take(np.arange(start, start + sizes[place]), axis=axis - 1)


def _indices(dims: Sequence[int]) -> NDArray[np.int64]:
    return np.arange(int(np.prod(dims)), dtype=np.int64).reshape(dims)


_Taking = Callable[[ir.Node, ir.Value, Sequence[int], ProbedGraph], NDArray[np.int64] | None]
_TAKEN: dict[str, _Taking] = {"Gather": _gathered, "Slice": _sliced, "Split": _split}
"""Operators that take some of the channels."""


_Constants = Mapping[ir.Value, NDArray[np.generic]]


def redirect_sizes(
    graph: ir.Graph, convolution: ir.Node, path: set[ir.Node], probed: ProbedGraph
) -> bool:
    """Let shapes of the rows of a 1x1 convolution be read from its input.

    Return whether the path can leave it: other nodes read other slices of its channels only.
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

    The graph is to lose the ``replaced`` nodes.
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

    The result is None if other nodes read the rows or their channels.
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
