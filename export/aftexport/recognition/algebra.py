"""The normal form of formulas over named axes, equal for all ways to write a mechanism.

A formula is a product of atoms with powers. It does not show the order of factors, the layout of
dims, the order of products, or the difference between division and reciprocal. In particular

    exp(a + b) = exp(a) exp(b),  softmax_u(a) = exp(a) / sum_u exp(a),  sum_u sum_v = sum_uv,
    sum_u f g[u] = f sum_u g[u],  f / f = 1,  c^2 = c for a condition c, which is 1 or 0:

A maximum that is subtracted from logits leaves the sum and cancels if it does not depend on the
summed axis. Otherwise it stays in the formula.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir

from aftexport.recognition.terms import (
    ONE,
    Atom,
    Axis,
    CausalMask,
    Count,
    Dims,
    Exp,
    Function,
    Indicator,
    Max,
    Plus,
    Product,
    Sum,
    Unreadable,
    Window,
    as_product,
    flat,
    number,
    single_atom,
)

Names = Mapping[Axis, tuple[int, int]]
"""The names of summed axes: the depth of the sums within their sum, and an index."""

_MAX_SUMMED = 6
"""The most axes of one sum, since orders of them are tried; mechanisms have four or fewer."""
_MAX_TEXT = 4096
"""The most characters of a text without digest; texts of the mechanisms have a tenth."""
_THIS, _OTHER = -1, -2
_NO_NAMES: frozenset[Any] = frozenset()


# The text of an atom is computed once for each way to name the axes it shares with the sums around
# it, and a long text is replaced by its digest. So a formula of n atoms takes about n computations,
# and not a multiple of that for each sum within a sum.
def key(product: Product) -> str:
    """Return a text that only equal formulas share; raises Unreadable for too many axes."""
    return _product(product, {})


def key_of(atom: Atom) -> str:
    """Return the key of a formula that is one atom."""
    return f"{_atom(atom, {})}^1"


def _product(product: Product, names: Names) -> str:
    factors = sorted(f"{_atom(atom, names)}^{exponent:.12g}" for atom, exponent in product.factors)
    if product.coefficient != 1.0:
        factors.insert(0, f"{product.coefficient:.12g}")
    if product.exponent:
        factors.insert(0, f"e^{product.exponent:.12g}")
    return "*".join(factors)


def _atom(atom: Atom, names: Names) -> str:
    """Return the text of an atom, from memory if no axis was split since."""
    texts: dict[frozenset[Any], str] = remembered(atom).setdefault("texts", {})
    if names:
        own = free_of(atom)
        names = {axis: name for axis, name in names.items() if axis in own}
    context = frozenset(names.items()) if names else _NO_NAMES
    if context not in texts:
        texts[context] = _shortened(compute_text(atom, names))
    return texts[context]


def _shortened(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:64]}~{hashlib.blake2b(text.encode(), digest_size=20).hexdigest()}"


def compute_text(atom: Atom, names: Names) -> str:
    """Return the text of an atom, whose children may be in memory."""
    if isinstance(atom, Sum | Max):
        return _text_of_reduction(atom, names)
    children = [_product(child, names) for child in atom.children]
    return atom.text(children, lambda axes: _axes(axes, names))


def _axes(axes: Iterable[Axis], names: Names) -> str:
    return ",".join(
        "{}.{}".format(*names[axis]) if axis in names else f"#{axis.number:09}"
        for axis in flat(axes)
    )


def _text_of_reduction(reduction: Sum | Max, names: Names) -> str:
    axes, body = reduction.bound_axes, reduction.body
    if len(axes) > _MAX_SUMMED:
        raise Unreadable(f"a sum is over {len(axes)} axes, more than {_MAX_SUMMED}")
    height = sums_within(body)
    texts = (_product(body, {**names, **order}) for order in _orders(height, axes, body, names))
    return min(reduction.text([text], lambda axes: _axes(axes, names)) for text in texts)


def _orders(
    height: int, axes: tuple[Axis, ...], body: Product, names: Names
) -> Iterator[dict[Axis, tuple[int, int]]]:
    """Yield names for the axes of a sum, in every order of axes that occur in the same places."""

    def places(axis: Axis) -> str:
        own = {a: (height, _THIS if a is axis else _OTHER) for a in axes}
        return _product(body, {**names, **own})

    if len(axes) == 1:
        yield {axes[0]: (height, 0)}
        return
    groups: dict[str, list[Axis]] = {}
    for axis in axes:
        groups.setdefault(places(axis), []).append(axis)
    alike = (itertools.permutations(groups[text]) for text in sorted(groups))
    for order in itertools.product(*alike):
        yield {axis: (height, i) for i, axis in enumerate(itertools.chain(*order))}


def free(product: Product) -> set[Axis]:
    """Return the axes a formula depends on."""
    return set().union(*(free_of(atom) for atom, _ in product.factors))


def free_of(atom: Atom) -> frozenset[Axis]:
    """Return the axes an atom depends on."""
    memory = remembered(atom)
    if "free" not in memory:
        memory["free"] = _free(atom)
    axes: frozenset[Axis] = memory["free"]
    return axes


def sums_within(product: Product) -> int:
    """Return the largest number of sums and maxima within one another in a formula."""
    depth = 0
    for atom, _ in product.factors:
        memory = remembered(atom)
        if "sums" not in memory:
            inner = max(map(sums_within, atom.children), default=0)
            memory["sums"] = inner + isinstance(atom, Sum | Max)
        depth = max(depth, memory["sums"])
    return depth


def remembered(atom: Atom) -> dict[str, Any]:
    """Return the memory of an atom, emptied after a split of one of its axes."""
    memory = atom.memory
    if memory.get("splits") != Axis.splits:
        if "axes" not in memory or any(axis.parts is not None for axis in memory["axes"]):
            memory.clear()
            memory["axes"] = _mentioned(atom)
        memory["splits"] = Axis.splits
    return memory


def _free(atom: Atom) -> frozenset[Axis]:
    inner = frozenset[Axis]().union(*map(free, atom.children))
    return inner.union(atom.own_axes).difference(atom.bound_axes)


def _mentioned(atom: Atom) -> set[Axis]:
    """Return the axes that an atom depends on or reduces, in their present parts."""
    axes = set(atom.own_axes)
    for child in atom.children:
        axes.update(*(remembered(inner)["axes"] for inner, _ in child.factors))
    return axes


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


# Convolutions, slices of padded tensors and gathers are sums over the positions they read, with a
# window that is 1 at those positions. A window of a window is merged into one window.
def sum_over_windows(axes: Iterable[Axis], product: Product) -> Product:
    """Return ``sum_over`` with windows of windows merged."""
    total = sum_over(axes, product)
    factors = []
    for atom, power in total.factors:
        step = _step(atom) if isinstance(atom, Sum) and power == 1.0 else None
        factors.append(Product(((atom, power),)) if step is None else sum_over_windows(*step))
    return multiply(Product((), total.coefficient, total.exponent), *factors)


def has_window(product: Product) -> bool:
    """Return whether a factor is a sum over a window, and no other sum divides it."""
    windowed = any(
        isinstance(atom, Sum) and any(isinstance(a, Window) for a, _ in atom.body.factors)
        for atom, _ in product.factors
    )
    return windowed and not any(isinstance(atom, Sum) and p < 0 for atom, p in product.factors)


def _step(total: Sum) -> tuple[set[Axis], Product] | None:
    """Return the axes and the summand of a sum after one merge, None if none applies."""
    bound = set(flat(total.axes))
    factors = total.body.factors
    windows = [atom for atom, power in factors if isinstance(atom, Window) and power == 1.0]
    for window in (w for w in windows if w.key in bound):
        rest = Product(
            tuple(f for f in factors if f[0] is not window),
            total.body.coefficient,
            total.body.exponent,
        )
        left = bound - {window.key}
        for other in windows:
            if other is not window and _same_place(other, window) and other.key in bound:
                return left, substitute(rest, {window.key: other.key})
        readers = [f for f in rest.factors if window.key in free(as_product(f[0]))]
        if readers and all(isinstance(a, Window) and _passes(window, a) for a, _ in readers):
            passed = tuple(
                (_composed(window, atom), power)
                if isinstance(atom, Window) and (atom, power) in readers
                else (atom, power)
                for atom, power in rest.factors
            )
            return left, Product(passed, rest.coefficient, rest.exponent)
    return None


def _same_place(first: Window, second: Window) -> bool:
    return (
        first.shift == second.shift
        and set(first.positions) == set(second.positions)
        and first.key.sizes == second.key.sizes
    )


def _passes(outer: Window, inner: Window) -> bool:
    """Return whether ``outer`` never reads an entry that ``inner`` cuts off."""
    if [axis for axis, _ in inner.positions].count(outer.key) != 1 or inner.key is outer.key:
        return False
    runs = range(len(outer.key.sizes))
    ends = [
        outer.shift + sum(step * (axis.sizes[run] - 1) for axis, step in outer.positions)
        for run in runs
    ]
    inside = outer.shift >= 0 and all(
        end < size for end, size in zip(ends, outer.key.sizes, strict=True)
    )
    padded = (
        inner.positions == ((outer.key, 1),)
        and inner.shift <= 0
        and all(
            own - inner.shift <= size
            for own, size in zip(inner.key.sizes, outer.key.sizes, strict=True)
        )
    )
    return inside or padded


def _composed(outer: Window, inner: Window) -> Window:
    (by,) = (step for axis, step in inner.positions if axis is outer.key)
    positions = [pair for pair in inner.positions if pair[0] is not outer.key]
    positions += [(axis, by * step) for axis, step in outer.positions]
    return Window(inner.key, tuple(positions), inner.shift + by * outer.shift)
