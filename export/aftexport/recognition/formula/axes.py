"""Axes of tensors as things of their own, so that what permutes, splits and merges dims is
bookkeeping and not arithmetic.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from aftexport.recognition.formula.unreadable import Unreadable

Sizes = tuple[int, ...]
"""The size of something in each of the runs that a graph was measured in."""


_numbers = itertools.count()
_UNEVEN = "a reshape splits a dim unevenly"


@dataclass(eq=False)
class Axis:
    """An index that a formula runs over.

    Attributes:
        sizes: in each measured run; one that is the same in all is fixed.
        parts: what it turned out to be made of, slowest first.
        number: larger than that of any axis made before. What is put in an order, is by this: by
            the place in memory one graph would be written in another way each time.
    """

    splits: ClassVar[int] = 0
    """How many axes got parts so far: what was remembered of formulas before may be out of date."""
    sizes: Sizes
    parts: "tuple[Axis, ...] | None" = None
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
    """Which entries of a dim are read.

    Attributes:
        axes: of the part itself; none where it has one entry.
        firsts: how many entries are before it, in each run.
        sizes: how many it has, in each run.
    """

    axes: tuple[Axis, ...]
    firsts: Sizes
    sizes: Sizes


Dims = tuple[tuple[Axis, ...], ...]
"""For each dim of a tensor the axes it is made of, slowest first; none where its size is 1."""


def flat(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes that have no parts, in order."""
    result: list[Axis] = []
    for axis in axes:
        result += [axis] if axis.parts is None else flat(axis.parts)
    return tuple(result)


def flat_dims(dims: Dims) -> Dims:
    """``flat`` for every dim."""
    return tuple(flat(axes) for axes in dims)


def size(axes: Iterable[Axis], runs: int) -> Sizes:
    """How many entries axes have together, in each run."""
    axes = list(axes)
    return tuple(math.prod(axis.sizes[run] for axis in axes) for run in range(runs))


def fresh(sizes: Sizes) -> tuple[Axis, ...]:
    """A new axis for a dim; none where it has one entry in every run."""
    return () if set(sizes) == {1} else (Axis(sizes),)


def regroup(axes: Sequence[Axis], shape: Sequence[Sizes]) -> Dims:
    """Distributes axes over the dims of ``shape``, as a reshape does, splitting where it must.

    Raises:
        Unreadable: where that takes a split that does not come out even.
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
