"""Sums over windows: convolutions, slices of padded tensors, and gathers.

Each is a sum over the positions it reads, with a ``Window`` that is 1 at those positions. A window
of a window is merged into one window.
"""

from collections.abc import Iterable

from aftexport.recognition.formula import algebra
from aftexport.recognition.formula.algebra import free, multiply, substitute
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import Product, Sum, Window, as_product


def sum_over(axes: Iterable[Axis], product: Product) -> Product:
    """Return ``algebra.sum_over`` with windows of windows merged."""
    total = algebra.sum_over(axes, product)
    factors = []
    for atom, power in total.factors:
        step = _step(atom) if isinstance(atom, Sum) and power == 1.0 else None
        factors.append(Product(((atom, power),)) if step is None else sum_over(*step))
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
