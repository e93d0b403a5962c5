"""Triangles of a matrix, as causal masks keep them."""

import math

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import multiply
from aftexport.recognition.formula.axes import Axis, Dims
from aftexport.recognition.formula.terms import CausalMask, Product, as_product
from aftexport.recognition.formula.unreadable import Unreadable
from aftexport.recognition.graph.shape_probe import depends_on_inputs
from aftexport.recognition.read.reader import Reader, scalar


def _trilu(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    diagonal = 0
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        offset = reader.probed.fixed_value(node.inputs[1])
        if offset is None:
            return None
        diagonal = int(scalar(offset))
    if any(len(axes) != 1 for axes in dims[-2:]):
        return None
    kept = _triangle(dims[-2][0], dims[-1][0]).get((node.attributes.get_int("upper", 1), diagonal))
    source = reader.input(node, 0)
    body = reader.read(source, dims)
    if kept is None or (body.factors and not depends_on_inputs(source)):
        return None  # a constant is read whole
    return multiply(kept, body)


def _compared(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    """Read a comparison of positions, which is a triangle for each length."""
    value = node.outputs[0]
    places = [place for place, axes in enumerate(dims) if axes]
    if len(places) != 2 or any(len(axes) > 1 for axes in dims) or depends_on_inputs(value):
        return None
    squares = [_square(run, len(dims), places) for run in reader.probed.in_every_run(value) or ()]
    for (upper, diagonal), kept in _triangle(*(dims[place][0] for place in places)).items():
        cut = np.triu if upper else np.tril
        if squares and all(np.array_equal(a, cut(np.ones_like(a), diagonal)) for a in squares):
            return kept
    return None


def _square(run: NDArray[np.generic], rank: int, places: list[int]) -> NDArray[np.generic]:
    """Return an array with only the dims at two places; raises Unreadable for one of more dims."""
    sizes = [size for place, size in enumerate(run.shape) if place in places]
    if run.ndim != rank or run.size != math.prod(sizes):
        raise Unreadable("a comparison of positions has more dims at some sizes")
    return run.reshape(sizes)


def _triangle(row: Axis, column: Axis) -> dict[tuple[int, int], Product]:
    """Return formulas of triangles, by whether they are upper and by their diagonal."""
    return {
        (0, 0): as_product(CausalMask(row, column)),
        (1, 1): algebra.negation(as_product(CausalMask(row, column))),
        (1, 0): as_product(CausalMask(column, row)),
        (0, -1): algebra.negation(as_product(CausalMask(column, row))),
    }


FORMULAS = {
    "Trilu": _trilu,
    "Less": _compared,
    "LessOrEqual": _compared,
    "Greater": _compared,
    "GreaterOrEqual": _compared,
}
