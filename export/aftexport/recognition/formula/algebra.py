"""The normal form of formulas over named axes, equal for all ways to write a mechanism.

A formula is a product of atoms with powers. It does not show the order of factors, the layout of
dims, the order of products, or the difference between division and reciprocal. In particular

    exp(a + b) = exp(a) exp(b),  softmax_u(a) = exp(a) / sum_u exp(a),  sum_u sum_v = sum_uv,
    sum_u f g[u] = f sum_u g[u],  f / f = 1,  c^2 = c for a condition c, which is 1 or 0:

A maximum that is subtracted from logits leaves the sum and cancels if it does not depend on the
summed axis. Otherwise it stays in the formula.
"""

import math
from collections.abc import Iterable, Mapping

import onnx_ir as ir

from aftexport.recognition.formula.axes import Axis, Dims, Unreadable, flat
from aftexport.recognition.formula.keys import free as free
from aftexport.recognition.formula.keys import key, key_of, remembered
from aftexport.recognition.formula.terms import (
    ONE,
    Atom,
    CausalMask,
    Count,
    Exp,
    Function,
    Indicator,
    Max,
    Plus,
    Product,
    Sum,
    Window,
    as_product,
    number,
    single_atom,
)


def scaled(product: Product, by: float) -> Product:
    """Return ``by`` times a formula."""
    return Product(product.factors, product.coefficient * by, product.exponent)


def multiply(*products: Product) -> Product:
    """Return the product of formulas; equal factors are merged, and powers of 0 are dropped."""
    merged: dict[str, tuple[Atom, float]] = {}
    for product in products:
        for atom, power in product.factors:
            name = key_of(atom)
            merged[name] = _factor(atom, merged[name][1] + power if name in merged else power)
    factors = tuple(pair for _, pair in sorted(merged.items()) if pair[1] != 0.0)
    coefficient = math.prod(product.coefficient for product in products)
    return Product(factors, coefficient, sum(product.exponent for product in products))


def _factor(atom: Atom, power: float) -> tuple[Atom, float]:
    """Return an atom to a power; all positive powers of an indicator are the same."""
    return atom, 1.0 if isinstance(atom, Indicator | CausalMask | Window) and power > 0.0 else power


def power(product: Product, to: float) -> Product:
    """Return a formula to a constant power."""
    if product.coefficient <= 0.0 and not to.is_integer():
        # The root of a negative product is not a product of roots.
        raise Unreadable("a root is taken of a formula that may be negative")
    if product.coefficient == 0.0 and to < 0:
        raise Unreadable("a constant is divided by 0")
    try:
        coefficient = product.coefficient**to
    except OverflowError:
        raise Unreadable(f"{product.coefficient:g} to the power {to:g} overflows") from None
    factors = tuple(_factor(atom, p * to) for atom, p in product.factors)
    return Product(factors, coefficient, product.exponent * to)


def constant_factor(product: Product) -> float:
    """Return the number that the factors of a formula are multiplied by."""
    try:
        return product.coefficient * math.exp(product.exponent)
    except OverflowError:
        raise Unreadable(f"exp({product.exponent:g}) overflows") from None


def add(terms: Iterable[Product], value: ir.Value | None = None, dims: Dims = ()) -> Product:
    """Return the sum of formulas; equal terms are merged."""
    merged: dict[str, Product] = {}
    for term in terms:
        inner = single_atom(term)
        parts = _named_terms(inner) if isinstance(inner, Plus) else dict([_named(term)])
        if not merged:
            merged = {**parts}
            continue
        for name, part in parts.items():
            before = merged[name].coefficient if name in merged else 0.0
            merged[name] = Product(part.factors, part.coefficient + before)
    left = {name: merged[name] for name in sorted(merged) if merged[name].coefficient != 0.0}
    if not left:
        return number(0.0)
    total = Plus(tuple(left.values()), value, dims)
    remembered(total)["terms"] = left
    return total.terms[0] if len(left) == 1 else as_product(total)


def _named_terms(total: Plus) -> dict[str, Product]:
    """Return the terms of a sum by key without coefficient, from memory until an axis is split."""
    memory = remembered(total)
    if "terms" not in memory:
        memory["terms"] = dict(map(_named, total.terms))
    terms: dict[str, Product] = memory["terms"]
    return terms


def _named(term: Product) -> tuple[str, Product]:
    coefficient = constant_factor(term)
    return key(Product(term.factors)), Product(term.factors, coefficient)


def negation(product: Product) -> Product:
    """Return 1 minus a formula that is 1 or 0."""
    atom = single_atom(product)
    if isinstance(atom, Indicator):
        return as_product(Indicator(atom.value, atom.dims, not atom.holds))
    terms = atom.terms if isinstance(atom, Plus) else (product,)
    return add((ONE, *(scaled(term, -1.0) for term in terms)))


def exponential(product: Product) -> Product:
    """Return ``exp`` of a formula as a product with a factor for each of its terms."""
    if not product.factors:
        return Product(exponent=constant_factor(product))
    coefficient = constant_factor(product)
    if len(product.factors) == 1 and product.factors[0][1] == 1.0:
        atom = product.factors[0][0]
        if isinstance(atom, Plus):
            return multiply(*(_exponential_of_term(scaled(t, coefficient)) for t in atom.terms))
    return _exponential_of_term(Product(product.factors, coefficient))


def _exponential_of_term(term: Product) -> Product:
    if not term.factors:
        return Product(exponent=term.coefficient)
    atom = single_atom(Product(term.factors))
    if isinstance(atom, Function) and atom.name == "Log":
        return power(atom.arguments[0], term.coefficient)
    return Product(((Exp(Product(term.factors)), term.coefficient),))


def sum_over(axes: Iterable[Axis], product: Product) -> Product:
    """Return the sum over axes; factors that do not depend on them are taken out of it."""
    bound = set(flat(axes))
    inside: list[tuple[Atom, float]] = []
    outside: list[tuple[Atom, float]] = []
    pending = list(product.factors)
    while pending:
        atom, exponent = pending.pop()
        if exponent == 1.0 and isinstance(atom, Sum) and free(as_product(atom)) & bound:
            bound |= set(flat(atom.axes))
            pending += [*atom.body.factors]
            product = Product(
                (),
                product.coefficient * atom.body.coefficient,
                product.exponent + atom.body.exponent,
            )
        else:
            (inside if free(as_product(atom)) & bound else outside).append((atom, exponent))
    # A sum that was merged later may bind axes of factors already put outside.
    outside, late = (
        [f for f in outside if not free(as_product(f[0])) & bound],
        [f for f in outside if free(as_product(f[0])) & bound],
    )
    sums = [_counted(axis) for axis in bound - free(Product(tuple(inside + late)))]
    sums += [
        as_product(Sum(_in_order(bound & free(group)), group))
        for group in _connected(inside + late, bound)
    ]
    return multiply(Product(tuple(outside), product.coefficient, product.exponent), *sums)


def _in_order(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted(axes, key=lambda axis: axis.number))


def _counted(axis: Axis) -> Product:
    return number(float(axis.sizes[0])) if axis.is_fixed else as_product(Count(axis))


def _connected(factors: list[tuple[Atom, float]], bound: set[Axis]) -> list[Product]:
    """Return groups of factors that share summed axes: the sum is a product of a sum for each."""
    groups: list[tuple[set[Axis], list[tuple[Atom, float]]]] = []
    for factor in factors:
        axes, members = free(as_product(factor[0])) & bound, [factor]
        for group in [g for g in groups if g[0] & axes]:
            groups.remove(group)
            axes, members = axes | group[0], group[1] + members
        groups.append((axes, members))
    return [multiply(Product(tuple(members))) for _, members in groups]


def max_over(axes: Iterable[Axis], product: Product) -> Product:
    """Return the maximum over axes."""
    return as_product(Max(flat(axes), product))


def occurring(product: Product) -> set[Axis]:
    """Return the axes a formula depends on, and the axes of tensors that hold parts of it."""
    axes = free(product)
    for atom, _ in product.factors:
        inner = set[Axis]().union(*map(occurring, atom.children))
        axes |= {*atom.tensor_axes} | inner.difference(atom.bound_axes)
    return axes


def substitute(product: Product, axes: Mapping[Axis, Axis]) -> Product:
    """Return the formula with other axes in place of its own."""
    factors = tuple(
        (atom.rebuild([substitute(child, axes) for child in atom.children], axes), exponent)
        for atom, exponent in product.factors
    )
    return Product(factors, product.coefficient, product.exponent)
