"""Operators that only move, repeat, join or pad entries, read as other dims of the same axes.

A tensor that is concatenated or padded along an axis is read if it is sliced apart again.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from aftexport.recognition.formula.algebra import occurring
from aftexport.recognition.formula.axes import Axis, Dims, Part, Sizes, flat, regroup
from aftexport.recognition.formula.terms import Product, number
from aftexport.recognition.read.reader import Reader, axis_index


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
