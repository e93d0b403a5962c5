"""What formulas over named axes are made of."""

from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from aftexport.recognition.formula.axes import Axis, Dims


@dataclass(frozen=True, eq=False)
class _AtomBase:
    """Attributes: memory: results computed for this atom, by the module that computes them."""

    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


@dataclass(frozen=True, eq=False)
class Leaf(_AtomBase):
    """A tensor of the graph that is not looked into."""

    value: ir.Value
    dims: Dims


@dataclass(frozen=True, eq=False)
class Indicator(_AtomBase):
    """1 where a condition, a tensor of the graph, is ``holds``, else 0."""

    value: ir.Value
    dims: Dims
    holds: bool = True


@dataclass(frozen=True, eq=False)
class Function(_AtomBase):
    """An elementwise function of formulas; ``value`` holds it where the graph has it as it is."""

    name: str
    arguments: "tuple[Product, ...]"
    value: ir.Value | None
    dims: Dims


@dataclass(frozen=True, eq=False)
class Plus(_AtomBase):
    """A sum of terms; ``value`` holds it where the graph has it as it is."""

    terms: "tuple[Product, ...]"
    value: ir.Value | None
    dims: Dims


@dataclass(frozen=True, eq=False)
class Exp(_AtomBase):
    """An exponential; its argument has the coefficient 1."""

    argument: "Product"


@dataclass(frozen=True, eq=False)
class Sum(_AtomBase):
    """A sum over axes."""

    axes: tuple[Axis, ...]
    body: "Product"


@dataclass(frozen=True, eq=False)
class Max(_AtomBase):
    """A maximum over axes."""

    axes: tuple[Axis, ...]
    body: "Product"


@dataclass(frozen=True, eq=False)
class Count(_AtomBase):
    """The size of an axis that is not fixed."""

    axis: Axis


@dataclass(frozen=True, eq=False)
class CausalMask(_AtomBase):
    """1 where the position on ``key`` is not after that on ``query``, else 0."""

    query: Axis
    key: Axis


@dataclass(frozen=True, eq=False)
class Window(_AtomBase):
    """1 where the position on ``key`` is ``shift + sum step * position``, else 0.

    Attributes:
        key: the axis a window is on.
        positions: axes with their steps, as that of a window's place and that within it.
        shift: how far its first entry is from the first place.
    """

    key: Axis
    positions: tuple[tuple[Axis, int], ...]
    shift: int


Atom = Leaf | Indicator | Function | Plus | Exp | Sum | Max | Count | CausalMask | Window


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


def as_product(atom: Atom) -> Product:
    """An atom as a formula."""
    return Product(((atom, 1.0),))


def single_atom(product: Product) -> Atom | None:
    """The atom that a formula is, if it is just that."""
    if len(product.factors) == 1 and product.coefficient == 1.0 and product.exponent == 0.0:
        atom, power = product.factors[0]
        return atom if power == 1.0 else None
    return None
