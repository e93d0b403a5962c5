"""The atoms that formulas over named axes are products of.

Every atom names its children and its axes and can rebuild itself, so that a walk over formulas
needs no case for each class.
"""

# ruff: noqa: D102, the base class documents the methods

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import onnx_ir as ir


class Unreadable(Exception):  # noqa: N818, an outcome and not an error
    """The reason why a value has no formula, or a formula cannot be a tensor of the graph."""


Sizes = tuple[int, ...]
"""The size of a dim in each of the probed runs."""


_numbers = itertools.count()
_UNEVEN = "a reshape splits a dim unevenly"


@dataclass(eq=False)
class Axis:
    """An index that a formula runs over."""

    splits: ClassVar[int] = 0
    """The number of axes split so far; results remembered before the last split may be invalid."""
    sizes: Sizes  # the size in each probed run; an axis with one size in all of them is fixed
    parts: "tuple[Axis, ...] | None" = None  # the axes that a reshape split it into, slowest first
    # A number larger than that of any axis made before. Axes are sorted by it, so that a graph is
    # written in the same way each time.
    number: int = field(default_factory=_numbers.__next__, init=False)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "parts" and value is not None:
            Axis.splits += 1
        super().__setattr__(name, value)

    @property
    def is_fixed(self) -> bool:
        """Whether the size is the same in every run."""
        return len(set(self.sizes)) == 1


@dataclass(frozen=True)
class Part:
    """The entries of a dim that are read."""

    axes: tuple[Axis, ...]  # the axes of the part, none if it has one entry
    firsts: Sizes  # the number of entries before the part, in each run
    sizes: Sizes  # the number of entries of the part, in each run


Dims = tuple[tuple[Axis, ...], ...]
"""The axes of each dim of a tensor, slowest first; a dim of size 1 has none."""


def flat(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes in order, with split axes replaced by their parts."""
    result: list[Axis] = []
    for axis in axes:
        result += [axis] if axis.parts is None else flat(axis.parts)
    return tuple(result)


def flat_dims(dims: Dims) -> Dims:
    """Return ``flat`` of every dim."""
    return tuple(flat(axes) for axes in dims)


def size(axes: Iterable[Axis], runs: int) -> Sizes:
    """Return the product of the sizes of axes in each run."""
    axes = list(axes)
    return tuple(math.prod(axis.sizes[run] for axis in axes) for run in range(runs))


def fresh(sizes: Sizes) -> tuple[Axis, ...]:
    """Return a new axis for a dim, none if its size is 1 in every run."""
    return () if set(sizes) == {1} else (Axis(sizes),)


def regroup(axes: Sequence[Axis], shape: Sequence[Sizes]) -> Dims:
    """Distribute axes over the dims of ``shape`` as a reshape does, and split them where needed.

    Raises:
        Unreadable: if a split would be uneven.
    """
    rest = list(flat(axes))
    dims = []
    for wanted in shape:
        dim: list[Axis] = []
        while (have := size(dim, len(wanted))) != wanted:
            if not rest:
                raise Unreadable("a reshape has fewer entries than its shape")
            axis = rest.pop(0)
            if any(h * s > w for h, s, w in zip(have, axis.sizes, wanted, strict=True)):
                axis, remainder = _split(axis, have, wanted)
                rest.insert(0, remainder)
            dim.append(axis)
        dims.append(tuple(dim))
    if rest:
        raise Unreadable("a reshape has more entries than its shape")
    return tuple(dims)


def _split(axis: Axis, have: Sizes, wanted: Sizes) -> tuple[Axis, Axis]:
    if 0 in have or any(w % h for h, w in zip(have, wanted, strict=True)):
        raise Unreadable(_UNEVEN)
    slow = tuple(w // h for h, w in zip(have, wanted, strict=True))
    if 0 in slow or any(whole % part for whole, part in zip(axis.sizes, slow, strict=True)):
        raise Unreadable(_UNEVEN)
    fast = tuple(whole // part for whole, part in zip(axis.sizes, slow, strict=True))
    parts = Axis(slow), Axis(fast)
    axis.parts = parts
    return parts


NameAxes = Callable[[Iterable[Axis]], str]
"""A function that writes axes as text."""


@dataclass(frozen=True, eq=False)
class _AtomBase:
    """The methods of an atom."""

    # Results computed for this atom, by the module that computes them.
    memory: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def children(self) -> "tuple[Product, ...]":
        """The formulas that the atom is made of."""
        return ()

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        """The axes that the atom names itself."""
        return ()

    @property
    def bound_axes(self) -> tuple[Axis, ...]:
        """The axes that the atom names and does not depend on."""
        return ()

    @property
    def tensor_axes(self) -> tuple[Axis, ...]:
        """The axes of the tensor that holds a computed atom in the graph."""
        return ()

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        """Return the atom with other children and axes; sums and maxima keep their axes.

        ``axes`` has the new axis of each one that is renamed.
        """
        raise NotImplementedError

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        """Return a text that is the same for equal atoms."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Leaf(_AtomBase):
    """A tensor of the graph that is not looked into."""

    value: ir.Value
    dims: Dims

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        return _axes_of(self.dims)

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, dims=_renamed(self.dims, axes))

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"leaf{self.value.name!r}[{_text_of_dims(self.dims, name)}]"


@dataclass(frozen=True, eq=False)
class Indicator(_AtomBase):
    """1 where a boolean tensor of the graph is ``holds``, else 0."""

    value: ir.Value
    dims: Dims
    holds: bool = True

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        return _axes_of(self.dims)

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, dims=_renamed(self.dims, axes))

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"{self.holds}{self.value.name!r}[{_text_of_dims(self.dims, name)}]"


@dataclass(frozen=True, eq=False)
class Function(_AtomBase):
    """An elementwise function; ``value`` is the tensor of the graph that holds it, if one does."""

    name: str
    arguments: "tuple[Product, ...]"
    value: ir.Value | None
    dims: Dims

    @property
    def children(self) -> "tuple[Product, ...]":
        return self.arguments

    @property
    def tensor_axes(self) -> tuple[Axis, ...]:
        return _axes_of(self.dims)

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, arguments=tuple(children), dims=_renamed(self.dims, axes))

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"{self.name}({';'.join(children)})"


@dataclass(frozen=True, eq=False)
class Plus(_AtomBase):
    """A sum of terms; ``value`` is the tensor of the graph that holds it, if one does."""

    terms: "tuple[Product, ...]"
    value: ir.Value | None
    dims: Dims

    @property
    def children(self) -> "tuple[Product, ...]":
        return self.terms

    @property
    def tensor_axes(self) -> tuple[Axis, ...]:
        return _axes_of(self.dims)

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, terms=tuple(children), dims=_renamed(self.dims, axes))

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"plus({'+'.join(sorted(children))})"


@dataclass(frozen=True, eq=False)
class Exp(_AtomBase):
    """An exponential; its argument has the coefficient 1."""

    argument: "Product"

    @property
    def children(self) -> "tuple[Product, ...]":
        return (self.argument,)

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, argument=children[0])

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"exp({children[0]})"


@dataclass(frozen=True, eq=False)
class _Reduction(_AtomBase):
    """A reduction of ``body`` over axes."""

    symbol: ClassVar[str]  # the name of the reduction in texts
    axes: tuple[Axis, ...]
    body: "Product"

    @property
    def children(self) -> "tuple[Product, ...]":
        return (self.body,)

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        return flat(self.axes)

    @property
    def bound_axes(self) -> tuple[Axis, ...]:
        return flat(self.axes)

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, body=children[0])

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"{self.symbol}{len(self.own_axes)}({children[0]})"


@dataclass(frozen=True, eq=False)
class Sum(_Reduction):
    """A sum over axes."""

    symbol = "sum"


@dataclass(frozen=True, eq=False)
class Max(_Reduction):
    """A maximum over axes."""

    symbol = "max"


@dataclass(frozen=True, eq=False)
class Count(_AtomBase):
    """The size of an axis that is not fixed; ``value`` holds it, if a tensor of the graph does.

    Sizes that are the same in every probed run are the same.
    """

    axis: Axis
    value: ir.Value | None = None

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        return flat((self.axis,))

    @property
    def bound_axes(self) -> tuple[Axis, ...]:
        return flat((self.axis,))

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        return replace(self, axis=axes.get(self.axis, self.axis))

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"count({self.axis.sizes})"


@dataclass(frozen=True, eq=False)
class CausalMask(_AtomBase):
    """1 where the position on ``key`` is not after that on ``query``, else 0."""

    query: Axis
    key: Axis

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        return flat((self.query, self.key))

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        query, key = (axes.get(axis, axis) for axis in (self.query, self.key))
        return replace(self, query=query, key=key)

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        return f"upto({name((self.query,))}|{name((self.key,))})"


@dataclass(frozen=True, eq=False)
class Window(_AtomBase):
    """1 where the position on ``key`` is ``shift + sum step * position``, else 0."""

    key: Axis  # the axis that the window is on
    # Axes with their steps, as the place of a window and the place within it.
    positions: tuple[tuple[Axis, int], ...]
    shift: int  # the offset of the first entry from the first place

    @property
    def own_axes(self) -> tuple[Axis, ...]:
        return flat((self.key, *(axis for axis, _ in self.positions)))

    def rebuild(self, children: "Sequence[Product]", axes: Mapping[Axis, Axis]) -> Self:
        positions = tuple((axes.get(axis, axis), step) for axis, step in self.positions)
        return replace(self, key=axes.get(self.key, self.key), positions=positions)

    def text(self, children: Sequence[str], name: NameAxes) -> str:
        steps = sorted(f"{step}{name((axis,))}" for axis, step in self.positions)
        return f"window({name((self.key,))}={'+'.join(steps)}{self.shift:+d})"


Atom = Leaf | Indicator | Function | Plus | Exp | Sum | Max | Count | CausalMask | Window


@dataclass(frozen=True, eq=False)
class Product:
    """``coefficient * exp(exponent) * prod atom^power``; the exponent avoids overflow."""

    factors: tuple[tuple[Atom, float], ...] = ()
    coefficient: float = 1.0
    exponent: float = 0.0


ONE = Product()


def number(value: float) -> Product:
    """Return a constant."""
    return Product(coefficient=value)


def as_product(atom: Atom) -> Product:
    """Return an atom as a formula."""
    return Product(((atom, 1.0),))


def single_atom(product: Product) -> Atom | None:
    """Return the atom of a formula that is one atom, None for any other."""
    if len(product.factors) == 1 and product.coefficient == 1.0 and product.exponent == 0.0:
        atom, power = product.factors[0]
        return atom if power == 1.0 else None
    return None


def _axes_of(dims: Dims) -> tuple[Axis, ...]:
    return tuple(axis for axes in flat_dims(dims) for axis in axes)


def _renamed(dims: Dims, axes: Mapping[Axis, Axis]) -> Dims:
    return tuple(tuple(axes.get(axis, axis) for axis in dim) for dim in flat_dims(dims))


def _text_of_dims(dims: Dims, name: NameAxes) -> str:
    return "|".join(name(axes) for axes in flat_dims(dims) if axes)
