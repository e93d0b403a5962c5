"""Operators that only move, repeat, join or pad entries, read as other dims of the same axes.

A tensor that is concatenated or padded along an axis is read if it is sliced apart again. Windows,
as of convolutions channel by channel, are read if they have the weights of a mean in them, or if a
slice undoes a pad. In the layers between the mechanisms they stay leaves.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.algebra import has_window, multiply, occurring, sum_over_windows
from aftexport.recognition.read.reader import Reader, axis_index, scalar
from aftexport.recognition.terms import (
    Axis,
    Dims,
    Part,
    Product,
    Sizes,
    Unreadable,
    Window,
    as_product,
    flat,
    fresh,
    number,
    regroup,
)


def _transpose(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    order = node.attributes.get_ints("perm", list(reversed(range(len(dims)))))
    return reader.read(reader.input(node, 0), tuple(dims[order.index(i)] for i in range(len(dims))))


def _reshape(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    source = reader.input(node, 0)
    if node.op_type == "Reshape":
        reader.shapes.append((reader.input(node, 1), dims))
    return reader.read(source, regroup([a for axes in dims for a in axes], reader.shape(source)))


def _expand(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return reader.broadcast(reader.input(node, 0), dims)


def _tile(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    source = reader.input(node, 0)
    pairs = zip(reader.shape(source), reader.shape(node.outputs[0]), strict=True)
    if any(old != new and set(old) != {1} for old, new in pairs):
        return None
    return reader.broadcast(source, dims)


FORMULAS = {
    "Expand": _expand,
    "Flatten": _reshape,
    "Reshape": _reshape,
    "Squeeze": _reshape,
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _reshape,
}


def cut(
    reader: Reader, node: ir.Node, dims: Dims, firsts: Sequence[Sizes]
) -> tuple[Dims, dict[Axis, Part]]:
    """Return the dims of the input of a slice, and the parts of them that it takes with step 1.

    ``firsts`` counts the entries before the slice, for each dim in each run.
    """
    whole, own = reader.shape(reader.input(node, 0)), reader.shape(node.outputs[0])
    inner = list(dims)
    parts: dict[Axis, Part] = {}
    for dim, (first, size) in enumerate(zip(firsts, own, strict=True)):
        if size != whole[dim]:
            axis = Axis(whole[dim])
            inner[dim] = (axis,)
            parts[axis] = Part(dims[dim], first, size)
    return tuple(inner), parts


def are_read(formula: Product, parts: Mapping[Axis, Part]) -> bool:
    """Return whether a formula depends only on the parts of dims, and not on whole dims."""
    return bool(parts and formula.factors) and not occurring(formula) & {*flat(parts)}


def padded(
    reader: Reader, node: ir.Node, dims: Dims, pads: list[tuple[int, int]], filling: float
) -> Product | None:
    """Read a part of a tensor that is padded with a constant at the end of one axis."""
    changed = [axis for axis, pad in enumerate(pads) if pad != (0, 0)]
    if len(changed) != 1 or pads[changed[0]][0] != 0:
        return None
    (axis,) = changed
    source = reader.input(node, 0)
    part, own = _part(reader, dims, axis), reader.shape(source)[axis]
    if part is None:
        return None
    if all(first >= size for first, size in zip(part.firsts, own, strict=True)):
        return number(filling)
    if any(part.firsts) or part.sizes != own:
        return None
    return reader.read(source, (*dims[:axis], part.axes, *dims[axis + 1 :]))


def _concat(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    axis = axis_index(node.attributes.get_int("axis"), len(dims))
    part = _part(reader, dims, axis)
    if part is None:
        return None
    firsts = np.zeros(len(part.firsts), np.int64)
    for index in range(len(node.inputs)):
        source = reader.input(node, index)
        own = reader.shape(source)[axis]
        if part.firsts == tuple(firsts) and part.sizes == own:
            array = reader.probed.constant(source)
            if array is not None and array.size and np.all(array == array.flat[0]):
                return number(float(array.flat[0]))
            return reader.read(source, (*dims[:axis], part.axes, *dims[axis + 1 :]))
        firsts += own
    return None


def _part(reader: Reader, dims: Dims, axis: int) -> Part | None:
    axes = flat(dims[axis])
    return reader.parts.get(axes[0]) if len(axes) == 1 else None


PART_FORMULAS = {"Concat": _concat}


def _conv(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    source, weight = reader.input(node, 0), reader.input(node, 1)
    sizes, kernel = reader.shape(source), reader.shape(weight)
    spatial = len(sizes) - 2
    attributes = node.attributes
    depthwise = kernel[0] == sizes[1] == (attributes.get_int("group", 1),) * len(kernel[0])
    has_bias = len(node.inputs) > 2 and node.inputs[2] is not None
    stepped = set(attributes.get_ints("strides", [1])) != {1}
    if not depthwise or set(kernel[1]) != {1} or has_bias or stepped:
        return None
    if not reader.is_of_weights(source):
        return None
    dilations = attributes.get_ints("dilations", [1] * spatial)
    spans = [by * (taps[0] - 1) for by, taps in zip(dilations, kernel[2:], strict=True)]
    before = _pads_before(node, spans)
    if before is None:
        return None
    inner, taps = list(dims[:2]), []
    windows: list[Window] = []
    output = reader.shape(node.outputs[0])
    for i, place in enumerate(dims[2:]):
        own, tap = fresh(sizes[2 + i]), fresh(kernel[2 + i])
        if not tap and sizes[2 + i] == output[2 + i]:
            own = place
        elif len(own) != 1 or len(place) > 1:
            return None
        else:
            steps = [(axis, 1) for axis in place] + [(axis, dilations[i]) for axis in tap]
            windows.append(Window(own[0], tuple(steps), -before[i]))
        inner.append(own)
        taps.append(tap)
    filters = reader.read(weight, (dims[1], (), *taps))
    summed = [window.key for window in windows] + [axis for tap in taps for axis in tap]
    return sum_over_windows(
        summed, multiply(*map(as_product, windows), reader.read(source, tuple(inner)), filters)
    )


def _pads_before(node: ir.Node, spans: list[int]) -> Sequence[int] | None:
    """Return the padding before each spatial dim, None if it is not known.

    ``spans`` counts the entries that a filter spans beyond one, in each spatial dim.
    """
    how = node.attributes.get_string("auto_pad", "NOTSET")
    match how:
        case "NOTSET":
            return node.attributes.get_ints("pads", [0] * 2 * len(spans))[: len(spans)]
        case "VALID":
            return [0] * len(spans)
        case "SAME_UPPER":
            return [span // 2 for span in spans]
        case "SAME_LOWER":
            return [span - span // 2 for span in spans]
    return None


def _pad(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    source = reader.input(node, 0)
    sizes = reader.shape(source)
    rank = len(sizes)
    pads, axes = reader.probed.fixed_value(reader.input(node, 1)), _fixed_input(reader, node, 3)
    filling = _fixed_input(reader, node, 2)
    if pads is None or node.attributes.get_string("mode", "constant") != "constant":
        return None
    places = range(rank) if axes is None else [axis_index(int(a), rank) for a in axes.reshape(-1)]
    widths = {
        axis: (int(before), int(after))
        for axis, before, after in zip(places, *pads.reshape(2, -1), strict=True)
    }
    ends = [widths.get(i, (0, 0)) for i in range(rank)]
    if filling is not None and filling.any():
        return padded(reader, node, dims, ends, float(scalar(filling)))
    if not reader.is_of_weights(source):
        return None
    return _shifted(reader, source, dims, [(-before, 1) for before, _ in ends])


def _slice(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    source = reader.input(node, 0)
    sizes = reader.shape(source)
    rank = len(sizes)
    starts, axes, steps = (_fixed_input(reader, node, i) for i in (1, 3, 4))
    if starts is None:
        return None
    moved = range(len(starts)) if axes is None else [axis_index(int(a), rank) for a in axes]
    by = np.ones_like(starts) if steps is None else steps
    if any(step < 1 for step in by):
        return None
    firsts = [(0,) * len(own) for own in sizes]
    stepped = [1] * rank
    for axis, start, step in zip(moved, starts, by, strict=True):
        firsts[axis] = tuple(
            max(min(int(start) + (size if start < 0 else 0), size), 0) for size in sizes[axis]
        )
        stepped[axis] = int(step)
    # Read without effect first, since most slices are to stay leaves.
    own, taken = cut(reader, node, reader.new_dims(node.outputs[0]), firsts)
    formula = reader.read_separately(source, own, taken if set(stepped) == {1} else None)
    if are_read(formula, taken):
        own, taken = cut(reader, node, dims, firsts)
        reader.parts |= taken
        return reader.read(source, own)
    if any(len(set(first)) != 1 for first in firsts) or not has_window(formula):
        return None
    places = [(first[0], step) for first, step in zip(firsts, stepped, strict=True)]
    return _shifted(reader, source, dims, places)


def _shifted(
    reader: Reader, source: ir.Value, dims: Dims, places: list[tuple[int, int]]
) -> Product | None:
    """Read ``source`` at ``shift + step * position`` in each dim, as 0 outside of it."""
    sizes = reader.shape(source)
    inner: list[tuple[Axis, ...]] = []
    windows: list[Window] = []
    for place, own, (shift, step) in zip(dims, sizes, places, strict=True):
        same = all(axis.sizes == own for axis in place) and (place or set(own) == {1})
        if (shift, step) == (0, 1) and (same or len(place) > 1):
            inner.append(place)
            continue
        axes = fresh(own)
        if len(axes) != 1 or len(place) > 1:
            return None
        windows.append(Window(axes[0], tuple((axis, step) for axis in place), shift))
        inner.append(axes)
    body = multiply(*map(as_product, windows), reader.read(source, tuple(inner)))
    return sum_over_windows([window.key for window in windows], body)


def _gather(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    sizes = reader.shape(reader.input(node, 0))
    axis = axis_index(node.attributes.get_int("axis", 0), len(sizes))
    return _indexed(reader, node, dims, axis, False)


def _gather_nd(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    index = reader.shape(reader.input(node, 1))
    if node.attributes.get_int("batch_dims", 0) or set(index[-1]) != {1}:
        return None
    return _indexed(reader, node, dims, 0, True)


def _indexed(reader: Reader, node: ir.Node, dims: Dims, axis: int, listed: bool) -> Product | None:
    """Read entries of an axis whose indices are a sum of positions.

    If ``listed``, each index is in a list of one.
    """
    source, index = reader.input(node, 0), reader.input(node, 1)
    if not reader.is_windowed(source):
        return None
    runs = (*reader.probed.runs, *reader.probed.edge_runs)
    fixed = reader.probed.constant(index)
    kept = [run.get(str(index.name)) for run in runs] if fixed is None else [fixed]
    arrays = [a for a in kept if a is not None and a.ndim == len(reader.shape(index))]
    if len(arrays) < len(kept):
        raise Unreadable(f"the indices {index.name} are not known at every size")
    places = _affine_positions([a[..., 0] if listed else a for a in arrays])
    rank = len(reader.shape(index)) - listed
    at = dims[axis : axis + rank]
    if places is None or any(len(axes) > 1 for axes in at):
        return None
    shift, steps = places
    positions = tuple((a, step) for axes, step in zip(at, steps, strict=True) for a in axes)
    own = fresh(reader.shape(source)[axis])
    inner = (*dims[:axis], own, *dims[axis + rank :])
    if not own:
        return reader.read(source, inner) if shift == 0 and not positions else None
    return sum_over_windows(
        own, multiply(as_product(Window(own[0], positions, shift)), reader.read(source, inner))
    )


def _affine_positions(arrays: list[NDArray[np.generic]]) -> tuple[int, list[int]] | None:
    """Return ``shift`` and ``steps`` if every array is ``shift + sum step * index``, else None."""
    largest = max(arrays, key=lambda array: array.size)
    if not largest.size:
        return None
    shift = int(largest.reshape(-1)[0])
    steps = [
        int(largest.take(1, axis).reshape(-1)[0]) - shift if size > 1 else 0
        for axis, size in enumerate(largest.shape)
    ]
    for array in arrays:
        grid = np.indices(array.shape)
        expected = shift + sum(step * grid[axis] for axis, step in enumerate(steps))
        if not np.array_equal(array, np.broadcast_to(expected, array.shape)):
            return None
    return shift, steps


def _fixed_input(reader: Reader, node: ir.Node, index: int) -> NDArray[np.generic] | None:
    return reader.probed.fixed_value(node.inputs[index]) if len(node.inputs) > index else None


WINDOW_FORMULAS = {
    "Conv": _conv,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Slice": _slice,
}
