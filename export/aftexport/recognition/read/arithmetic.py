"""Elementwise operators with a normal form: products, sums, exponentials and masks.

True is 1 and false is 0.
"""

import math

import onnx_ir as ir

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import add, free, multiply, negation
from aftexport.recognition.formula.axes import Dims
from aftexport.recognition.formula.terms import Count, Function, Product, as_product
from aftexport.recognition.read.reader import Formula, Reader


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


def power_of_size(reader: Reader, node: ir.Node, dims: Dims) -> Product | None:
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


FORMULAS: dict[str, Formula] = {
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
