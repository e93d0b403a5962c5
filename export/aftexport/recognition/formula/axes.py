"""Named axes of tensors: transposes and reshapes only change which dim an axis belongs to."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar


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
