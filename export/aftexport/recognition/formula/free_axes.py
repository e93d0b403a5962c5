"""Which axes a formula depends on, and how deep its sums are, computed once for each atom."""

from typing import Any

from aftexport.recognition.formula.axes import Axis, flat, flat_dims
from aftexport.recognition.formula.terms import (
    Atom,
    CausalMask,
    Count,
    Exp,
    Function,
    Indicator,
    Leaf,
    Max,
    Plus,
    Product,
    Sum,
    Window,
)


def free(product: Product) -> set[Axis]:
    """The axes a formula depends on."""
    return set().union(*(free_of(atom) for atom, _ in product.factors))


def free_of(atom: Atom) -> frozenset[Axis]:
    """The axes an atom depends on."""
    memory = remembered(atom)
    if "free" not in memory:
        memory["free"] = _free(atom)
    axes: frozenset[Axis] = memory["free"]
    return axes


def sums_within(product: Product) -> int:
    """How many sums and maxima are within one another in a formula."""
    depth = 0
    for atom, _ in product.factors:
        memory = remembered(atom)
        if "sums" not in memory:
            inner = max(map(sums_within, _parts(atom)), default=0)
            memory["sums"] = inner + isinstance(atom, Sum | Max)
        depth = max(depth, memory["sums"])
    return depth


def remembered(atom: Atom) -> dict[str, Any]:
    """The memory of an atom, which is emptied once one of its axes got parts."""
    memory = atom.memory
    if memory.get("splits") != Axis.splits:
        if "axes" not in memory or any(axis.parts is not None for axis in memory["axes"]):
            memory.clear()
            memory["axes"] = _mentioned(atom)
        memory["splits"] = Axis.splits
    return memory


def _free(atom: Atom) -> frozenset[Axis]:
    match atom:
        case Sum() | Max():
            return frozenset(free(atom.body).difference(flat(atom.axes)))
        case Count():
            return frozenset()
    return frozenset(_own(atom).union(*map(free, _parts(atom))))


def _mentioned(atom: Atom) -> set[Axis]:
    """The axes that an atom depends on or sums over, as they are now."""
    found = _own(atom)
    for part in _parts(atom):
        found.update(*(remembered(inner)["axes"] for inner, _ in part.factors))
    return found


def _own(atom: Atom) -> set[Axis]:
    """The axes that an atom names itself."""
    match atom:
        case Leaf() | Indicator():
            return {axis for axes in flat_dims(atom.dims) for axis in axes}
        case Sum() | Max():
            return set(flat(atom.axes))
        case CausalMask():
            return set(flat((atom.query, atom.key)))
        case Window():
            return set(flat((atom.key, *(axis for axis, _ in atom.positions))))
        case Count():
            return set(flat((atom.axis,)))
    return set()


def _parts(atom: Atom) -> tuple[Product, ...]:
    """The formulas that an atom is made of."""
    match atom:
        case Function():
            return atom.arguments
        case Plus():
            return atom.terms
        case Exp():
            return (atom.argument,)
        case Sum() | Max():
            return (atom.body,)
    return ()
