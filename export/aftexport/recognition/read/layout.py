"""Operators that only move or repeat entries, read as other dims of the same axes."""

import onnx_ir as ir

from aftexport.recognition.formula.axes import Dims, regroup
from aftexport.recognition.formula.terms import Product
from aftexport.recognition.read.reader import Reader


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
