"""Operators on each entry alone that the normal form knows: products, sums, exponentials, masks.

True is 1 and false 0.
"""

import math

import onnx_ir as ir

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import free, negation, plus, times
from aftexport.recognition.formula.axes import Dims
from aftexport.recognition.formula.terms import Function, Product, one
from aftexport.recognition.read.reader import Reader


def _identity(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return reader.read(reader.input(node, 0), dims)


def _cast(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    measured, source, result = reader.measured, reader.input(node, 0), node.outputs[0]
    keeps = measured.is_float(source) and measured.is_float(result)
    if keeps or (
        measured.is_truth(source) and (measured.is_float(result) or measured.is_truth(result))
    ):
        return reader.read(source, dims)
    return reader.leaf(result, dims)


def _mul(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return times(*reader.arguments(node, dims))


def _div(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    numerator, denominator = reader.arguments(node, dims)
    return times(numerator, algebra.power(denominator, -1.0))


def _reciprocal(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return algebra.power(reader.arguments(node, dims)[0], -1.0)


def _sqrt(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    (argument,) = reader.arguments(node, dims)
    if argument.factors:
        return one(Function("Sqrt", (argument,), node.outputs[0], dims))
    return algebra.power(argument, 0.5)


def _pow(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    base, exponent = reader.arguments(node, dims)
    if exponent.factors or exponent.coefficient not in (-2.0, -1.0, 1.0, 2.0):
        return one(Function("Pow", (base, exponent), node.outputs[0], dims))
    return algebra.power(base, exponent.coefficient)


def _neg(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return algebra.scaled(reader.arguments(node, dims)[0], -1.0)


def _add(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return plus(reader.arguments(node, dims), node.outputs[0], dims)


def _sub(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    first, second = reader.arguments(node, dims)
    return plus((first, algebra.scaled(second, -1.0)), node.outputs[0], dims)


def _exp(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return algebra.exponential(reader.arguments(node, dims)[0])


def _and(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return times(*reader.arguments(node, dims))


def _or(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return negation(times(*map(negation, reader.arguments(node, dims))))


def _not(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    return negation(reader.arguments(node, dims)[0])


def _where(reader: Reader, node: ir.Node, dims: Dims) -> Product:
    condition, first, second = reader.arguments(node, dims)
    for truth, kept, other in ((condition, first, second), (negation(condition), second, first)):
        # What is decided for each entry by itself, as in a ReLU, is a function of the entry.
        if other.factors or (kept.factors and free(kept) <= free(truth)):
            continue
        if other.coefficient == 0.0:
            return times(truth, kept)
        if other.coefficient == -math.inf:
            left_out = one(Function("Log", (truth,), None, dims))
            return plus((kept, left_out), node.outputs[0], dims)
    return one(Function("Where", (condition, first, second), node.outputs[0], dims))


FORMULAS = {
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
