"""The axes a formula depends on and the depth of its sums, computed once for each atom."""

from typing import Any

from aftexport.recognition.formula.axes import Axis
from aftexport.recognition.formula.terms import Atom, Max, Product, Sum


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
