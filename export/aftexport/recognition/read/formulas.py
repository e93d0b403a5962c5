"""The functions that read nodes of standard operators as formulas, by ONNX name.

Each takes the reader, the node, and the axes of the dims of its output. It returns None for a node
that is to stay a leaf. Conditions are numbers: true is 1 and false is 0.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.recognition import algebra
from aftexport.recognition.algebra import add, free, multiply, negation, sum_over_windows
from aftexport.recognition.graph.shape_probe import depends_on_inputs
from aftexport.recognition.read import layout
from aftexport.recognition.read.layout import PART_FORMULAS, WINDOW_FORMULAS
from aftexport.recognition.read.reader import Formula, Reader, axis_index, scalar
from aftexport.recognition.terms import (
    ONE,
    Axis,
    CausalMask,
    Count,
    Dims,
    Function,
    Max,
    Product,
    Unreadable,
    as_product,
    fresh,
    number,
)


def _identity(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return reader.read(reader.input(node, 0), dims)


def _cast(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    probed, source, result = reader.probed, reader.input(node, 0), node.outputs[0]
    keeps = probed.is_float(source) and probed.is_float(result)
    if keeps or (
        probed.is_boolean(source) and (probed.is_float(result) or probed.is_boolean(result))
    ):
        return reader.read(source, dims)
    return reader.leaf(result, dims)


def _mul(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return multiply(*reader.arguments(node, dims))


def _div(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    numerator, denominator = reader.arguments(node, dims)
    return multiply(numerator, algebra.power(denominator, -1.0))


def _reciprocal(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return algebra.power(reader.arguments(node, dims)[0], -1.0)


def _is_size(product: Product) -> bool:
    """Return whether a formula is a product of sizes and a number, and so has any power."""
    return all(isinstance(atom, Count) for atom, _ in product.factors)


def _sqrt(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    (argument,) = reader.arguments(node, dims)
    if not _is_size(argument):
        return as_product(Function("Sqrt", (argument,), node.outputs[0], dims))
    return algebra.power(argument, 0.5)


def _power_of_size(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    """Read a power or a root of a size, and no other."""
    if reader.probed.size(reader.input(node, 0)) is None:
        return None
    return FORMULAS[node.op_type](reader, node, dims)


def _pow(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    base, exponent = reader.arguments(node, dims)
    whole = exponent.coefficient in (-2.0, -1.0, 1.0, 2.0)
    if exponent.factors or not (whole or (base.factors and _is_size(base))):
        return as_product(Function("Pow", (base, exponent), node.outputs[0], dims))
    return algebra.power(base, exponent.coefficient)


def _neg(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return algebra.scaled(reader.arguments(node, dims)[0], -1.0)


def _add(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return add(reader.arguments(node, dims), node.outputs[0], dims)


def _sub(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    first, second = reader.arguments(node, dims)
    return add((first, algebra.scaled(second, -1.0)), node.outputs[0], dims)


def _exp(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return algebra.exponential(reader.arguments(node, dims)[0])


def _and(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return multiply(*reader.arguments(node, dims))


def _or(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return negation(multiply(*map(negation, reader.arguments(node, dims))))


def _not(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return negation(reader.arguments(node, dims)[0])


def _where(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    condition, first, second = reader.arguments(node, dims)
    for truth, kept, other in ((condition, first, second), (negation(condition), second, first)):
        # A condition on the entry itself, as in a ReLU, makes it a function of the entry.
        if other.factors or (kept.factors and free(kept) <= free(truth)):
            continue
        if other.coefficient == 0.0:
            # The product does not show that a quotient of 0 by 0 is filled.
            reader.fills_weights |= any(power < 0.0 for _, power in kept.factors)
            return multiply(truth, kept)
        if other.coefficient == -math.inf:
            left_out = as_product(Function("Log", (truth,), None, dims))
            return add((kept, left_out), node.outputs[0], dims)
    return as_product(Function("Where", (condition, first, second), node.outputs[0], dims))


_ARITHMETIC: dict[str, Formula] = {
    "Add": _add,
    "And": _and,
    "Cast": _cast,
    "Div": _div,
    "Dropout": _identity,
    "Exp": _exp,
    "Identity": _identity,
    "Mul": _mul,
    "Neg": _neg,
    "Not": _not,
    "Or": _or,
    "Pow": _pow,
    "Reciprocal": _reciprocal,
    "Sqrt": _sqrt,
    "Sub": _sub,
    "Sum": _add,
    "Where": _where,
}


def _matmul(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    first, second = reader.input(node, 0), reader.input(node, 1)
    ranks = len(reader.shape(first)), len(reader.shape(second))
    if min(ranks) < 2:
        return None
    summed = fresh(reader.shape(first)[-1])
    batch, row, column = dims[:-2], dims[-2], dims[-1]
    return sum_over_windows(
        summed,
        multiply(
            reader.broadcast(first, (*batch, row, summed)),
            reader.broadcast(second, (*batch, summed, column)),
        ),
    )


def _gemm(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    first, second = reader.input(node, 0), reader.input(node, 1)
    summed = fresh(reader.shape(first)[0 if node.attributes.get_int("transA", 0) else 1])
    rows: Dims = (dims[0], summed)
    columns: Dims = (summed, dims[1])
    if node.attributes.get_int("transA", 0):
        rows = (summed, dims[0])
    if node.attributes.get_int("transB", 0):
        columns = (dims[1], summed)
    product = sum_over_windows(
        summed, multiply(reader.broadcast(first, rows), reader.broadcast(second, columns))
    )
    product = algebra.scaled(product, node.attributes.get_float("alpha", 1.0))
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return product
    bias = reader.broadcast(node.inputs[2], dims)
    bias = algebra.scaled(bias, node.attributes.get_float("beta", 1.0))
    return add((product, bias), node.outputs[0], dims)


def _einsum(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
    left, arrow, right = node.attributes.get_string("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in right:
        # The dims without letters; the last of them are shared by all terms.
        rest = [chr(0x3B1 + i) for i in range(len(dims) - len(right) + 3)]
        ranks = [len(reader.shape(v)) for v in node.inputs if v is not None]
        terms = [
            term.replace("...", "".join(rest[len(rest) - (rank - len(term) + 3) :]))
            for term, rank in zip(terms, ranks, strict=True)
        ]
        right = right.replace("...", "".join(rest))
    if not arrow or any("." in t or len(set(t)) != len(t) for t in (*terms, right)):
        return None
    ranks = [len(reader.shape(reader.input(node, i))) for i in range(len(node.inputs))]
    if list(map(len, (*terms, right))) != [*ranks, len(dims)]:
        raise Unreadable(f"the equation of an Einsum does not fit its {len(ranks)} inputs")
    axes = dict(zip(right, dims, strict=True))
    summed: list[Axis] = []
    for term, value in zip(terms, node.inputs, strict=True):
        for letter, sizes in zip(term, reader.shape(value), strict=True):  # type: ignore[arg-type]
            if letter not in axes:
                axes[letter] = fresh(sizes)
                summed += axes[letter]
    factors = [
        reader.broadcast(value, tuple(axes[letter] for letter in term))  # type: ignore[arg-type]
        for term, value in zip(terms, node.inputs, strict=True)
    ]
    return sum_over_windows(summed, multiply(*factors))


_PRODUCTS = {"Einsum": _einsum, "Gemm": _gemm, "MatMul": _matmul}


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
    return sum_over_windows(axes, body)


def _reduce_mean(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    count = sum_over_windows(axes, ONE)
    return multiply(sum_over_windows(axes, body), algebra.power(count, -1.0))


def _reduce_max(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    maximum = algebra.max_over(axes, body)
    reader.maxima += [a for a, _ in maximum.factors if isinstance(a, Max)]
    return maximum


def _reduce_log_sum_exp(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    body, axes = _reduced(reader, node, dims)
    total = sum_over_windows(axes, algebra.exponential(body))
    return as_product(Function("Log", (total,), node.outputs[0], dims))


def _softmax_parts(reader: Reader, node: ir.Node, dims: Dims) -> tuple[Product, Product]:
    source = reader.input(node, 0)
    axis = axis_index(node.attributes.get_int("axis", -1), len(dims))
    summed = fresh(reader.shape(source)[axis])
    inner = (*dims[:axis], summed, *dims[axis + 1 :])
    total = sum_over_windows(summed, algebra.exponential(reader.read(source, inner)))
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
    return sum_over_windows(summed, multiply(mask, reader.read(reader.input(node, 0), inner)))


def _constant_of_shape(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    value = node.attributes.get_tensor("value") if "value" in node.attributes else None
    return number(0.0 if value is None else float(scalar(value.numpy())))


_SUMS = {
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumsum,
    "LogSoftmax": _log_softmax,
    "ReduceLogSumExp": _reduce_log_sum_exp,
    "ReduceMax": _reduce_max,
    "ReduceMean": _reduce_mean,
    "ReduceSum": _reduce_sum,
    "Softmax": _softmax,
}


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


_TRIANGLES = {
    "Trilu": _trilu,
    "Less": _compared,
    "LessOrEqual": _compared,
    "Greater": _compared,
    "GreaterOrEqual": _compared,
}


FORMULAS: Mapping[str, Formula] = {
    **_ARITHMETIC,
    **layout.FORMULAS,
    **_SUMS,
    **_TRIANGLES,
    **_PRODUCTS,
    **PART_FORMULAS,
    **WINDOW_FORMULAS,
}


_OF_FEATURES = (
    "Conv", "Exp", "Gather", "GatherND", "LogSoftmax", "ReduceLogSumExp", "ReduceMax", "Softmax",
)  # fmt: skip


PRODUCT_FORMULAS: Mapping[str, Formula] = {
    name: formula for name, formula in FORMULAS.items() if name not in _OF_FEATURES
} | dict.fromkeys(("Pow", "Sqrt"), _power_of_size)
"""The formulas with which features are leaves: only products and sums of them are read."""


PRODUCT_FUNCTIONS = ("Clip", "Max")
"""The elementwise operators that may limit a denominator."""
