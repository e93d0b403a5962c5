"""What formulas over named axes are made of, and a text that is the same for equal ones."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from aftexport.fuse.axes import Axis, Dims, flat, flat_dims


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the graph that is not looked into."""

    value: ir.Value
    dims: Dims


@dataclass(frozen=True, eq=False)
class Truth:
    """1 where a condition, a tensor of the graph, is ``holds``, else 0."""

    value: ir.Value
    dims: Dims
    holds: bool = True


@dataclass(frozen=True, eq=False)
class Function:
    """An elementwise function of formulas; ``value`` holds it where the graph has it as it is."""

    name: str
    arguments: "tuple[Product, ...]"
    value: ir.Value | None
    dims: Dims


@dataclass(frozen=True, eq=False)
class Plus:
    """A sum of terms; ``value`` holds it where the graph has it as it is."""

    terms: "tuple[Product, ...]"
    value: ir.Value | None
    dims: Dims


@dataclass(frozen=True, eq=False)
class Exp:
    """An exponential; its argument has the coefficient 1."""

    argument: "Product"


@dataclass(frozen=True, eq=False)
class Over:
    """A sum over axes."""

    axes: tuple[Axis, ...]
    body: "Product"


@dataclass(frozen=True, eq=False)
class Greatest:
    """A maximum over axes."""

    axes: tuple[Axis, ...]
    body: "Product"


@dataclass(frozen=True, eq=False)
class Count:
    """The size of an axis that is not fixed."""

    axis: Axis


@dataclass(frozen=True, eq=False)
class UpTo:
    """1 where the position on ``key`` is not after that on ``query``, else 0."""

    query: Axis
    key: Axis


@dataclass(frozen=True, eq=False)
class Window:
    """1 where the position on ``key`` is ``shift + sum step * position``, else 0.

    Attributes:
        key: the axis a window is on.
        positions: axes with their steps, as that of a window's place and that within it.
        shift: how far its first entry is from the first place.
    """

    key: Axis
    positions: tuple[tuple[Axis, int], ...]
    shift: int


Atom = Leaf | Truth | Function | Plus | Exp | Over | Greatest | Count | UpTo | Window


@dataclass(frozen=True, eq=False)
class Product:
    """``coefficient * exp(exponent) * prod atom^power``; ``exponent`` keeps what would overflow."""

    factors: tuple[tuple[Atom, float], ...] = ()
    coefficient: float = 1.0
    exponent: float = 0.0


ONE = Product()


def number(value: float) -> Product:
    """A constant."""
    return Product(coefficient=value)


def one(atom: Atom) -> Product:
    """An atom as a formula."""
    return Product(((atom, 1.0),))


def sole(product: Product) -> Atom | None:
    """The atom that a formula is, if it is just that."""
    if len(product.factors) == 1 and product.coefficient == 1.0 and product.exponent == 0.0:
        atom, power = product.factors[0]
        return atom if power == 1.0 else None
    return None


_MOST_SUMMED = 6
"""Axes of one sum, every order of which is tried; those of the mechanisms have four or less."""


def key(product: Product, names: Mapping[Axis, str] | None = None) -> str:
    """A text that is the same for equal formulas, whatever their summed axes are called.

    Raises:
        ValueError: for a sum over more axes than any mechanism has.
    """
    names = names or {}

    def name(axis: Axis) -> str:
        return names.get(axis, f"#{axis.number:09}")

    def bound(kind: str, axes: tuple[Axis, ...], body: Product) -> str:
        if len(axes) > _MOST_SUMMED:
            raise ValueError
        own = [f"{len(names)}.{i}" for i in range(len(axes))]
        orders = (dict(zip(order, own, strict=True)) for order in itertools.permutations(axes))
        return min(f"{kind}{len(axes)}({key(body, {**names, **order})})" for order in orders)

    def dims(of: Dims) -> str:
        return "|".join(",".join(name(a) for a in axes) for axes in flat_dims(of) if axes)

    def text(atom: Atom) -> str:
        match atom:
            case Leaf():
                return f"leaf{atom.value.name!r}[{dims(atom.dims)}]"
            case Truth():
                return f"{atom.holds}{atom.value.name!r}[{dims(atom.dims)}]"
            case Function():
                return f"{atom.name}({';'.join(key(a, names) for a in atom.arguments)})"
            case Plus():
                return f"plus({'+'.join(sorted(key(t, names) for t in atom.terms))})"
            case Exp():
                return f"exp({key(atom.argument, names)})"
            case Over():
                return bound("sum", flat(atom.axes), atom.body)
            case Greatest():
                return bound("max", flat(atom.axes), atom.body)
            case UpTo():
                parts = "|".join(",".join(map(name, flat((a,)))) for a in (atom.query, atom.key))
                return f"upto({parts})"
            case Window():
                parts = "+".join(
                    sorted(f"{s}{','.join(map(name, flat((a,))))}" for a, s in atom.positions)
                )
                on = ",".join(map(name, flat((atom.key,))))
                return f"window({on}={parts}{atom.shift:+d})"
            case Count():
                return f"count({atom.axis.number:09})"

    factors = sorted(f"{text(atom)}^{exponent:.12g}" for atom, exponent in product.factors)
    if product.coefficient != 1.0:
        factors.insert(0, f"{product.coefficient:.12g}")
    if product.exponent:
        factors.insert(0, f"e^{product.exponent:.12g}")
    return "*".join(factors)
