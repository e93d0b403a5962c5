"""Sums, means and maxima over axes, running sums, and softmax."""

from collections.abc import Sequence

import onnx_ir as ir

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import add, multiply
from aftexport.recognition.formula.axes import Axis, Dims, fresh
from aftexport.recognition.formula.terms import (
    ONE,
    CausalMask,
    Function,
    Max,
    Product,
    as_product,
    number,
)
from aftexport.recognition.formula.unreadable import Unreadable
from aftexport.recognition.formula.windows import sum_over
from aftexport.recognition.read.reader import Reader, axis_index, scalar


def _reduced(reader: Reader, node: ir.Node, dims: Dims) -> tuple[Product, list[Axis]]:
    """Return the formula that a reduction reads, and the axes it reduces."""
    source = reader.input(node, 0)
    sizes = reader.shape(source)
    axes = _axes(reader, node, len(sizes))
    kept = node.attributes.get_int("keepdims", 1)
    rest = list(dims)
    inner: list[tuple[Axis, ...]] = []
    for dim, own in enumerate(sizes):
        if dim in axes:
            inner.append(fresh(own))
            if kept:
                rest.pop(0)
        else:
            inner.append(rest.pop(0))
    return reader.read(source, tuple(inner)), [a for dim in axes for a in inner[dim]]


def _axes(reader: Reader, node: ir.Node, rank: int) -> list[int]:
    listed: Sequence[int] | None = None
    if "axes" in node.attributes:
        listed = node.attributes.get_ints("axes")
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        array = reader.probed.constant(node.inputs[1])
        if array is None:
            raise Unreadable("the axes of a reduction are computed")
        listed = [int(a) for a in array.reshape(-1)]
    if not listed:
        return list(range(rank))
    return sorted(axis_index(a, rank) for a in listed)


def _reduce_sum(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    return sum_over(axes, body)


def _reduce_mean(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    count = sum_over(axes, ONE)
    return multiply(sum_over(axes, body), algebra.power(count, -1.0))


def _reduce_max(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    maximum = algebra.max_over(axes, body)
    reader.maxima += [a for a, _ in maximum.factors if isinstance(a, Max)]
    return maximum


def _reduce_log_sum_exp(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    total = sum_over(axes, algebra.exponential(body))
    return as_product(Function("Log", (total,), node.outputs[0], dims))


def _softmax_parts(reader: Reader, node: ir.Node, dims: Dims) -> tuple[Product, Product]:
    source = reader.input(node, 0)
    axis = axis_index(node.attributes.get_int("axis", -1), len(dims))
    summed = fresh(reader.shape(source)[axis])
    inner = (*dims[:axis], summed, *dims[axis + 1 :])
    total = sum_over(summed, algebra.exponential(reader.read(source, inner)))
    return reader.read(source, dims), total


def _softmax(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    logits, total = _softmax_parts(reader, node, dims)
    return multiply(algebra.exponential(logits), algebra.power(total, -1.0))


def _log_softmax(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    logits, total = _softmax_parts(reader, node, dims)
    log = as_product(Function("Log", (total,), node.outputs[0], dims))
    return add((logits, algebra.scaled(log, -1.0)), node.outputs[0], dims)


def _cumsum(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    attributes = node.attributes
    if attributes.get_int("exclusive", 0) or attributes.get_int("reverse", 0):
        return None
    along = reader.probed.constant(reader.input(node, 1))
    if along is None:
        return None
    axis = axis_index(int(scalar(along)), len(dims))
    summed = fresh(reader.shape(reader.input(node, 0))[axis])
    if not summed:
        return reader.read(reader.input(node, 0), dims)
    if len(dims[axis]) != 1:
        return None
    inner = (*dims[:axis], summed, *dims[axis + 1 :])
    mask = as_product(CausalMask(dims[axis][0], summed[0]))
    return sum_over(summed, multiply(mask, reader.read(reader.input(node, 0), inner)))


def _constant_of_shape(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    value = node.attributes.get_tensor("value") if "value" in node.attributes else None
    return number(0.0 if value is None else float(scalar(value.numpy())))


FORMULAS = {
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumsum,
    "LogSoftmax": _log_softmax,
    "ReduceLogSumExp": _reduce_log_sum_exp,
    "ReduceMax": _reduce_max,
    "ReduceMean": _reduce_mean,
    "ReduceSum": _reduce_sum,
    "Softmax": _softmax,
}
