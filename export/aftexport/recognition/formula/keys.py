"""Texts that are the same for equal formulas and do not depend on the names of summed axes.

The text of an atom is computed once for each way to name the axes it shares with the sums around
it. A long text is replaced by its digest. So a formula of n atoms takes about n computations,
and not a multiple of that for each sum within a sum. The axes that a formula depends on and the
depth of its sums are computed once for each atom too.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aftexport.recognition.formula.axes import Axis, Unreadable, flat
from aftexport.recognition.formula.terms import Atom, Max, Product, Sum

Names = Mapping[Axis, tuple[int, int]]
"""The names of summed axes: the depth of the sums within their sum, and an index."""

_MAX_SUMMED = 6
"""The most axes of one sum, since orders of them are tried; mechanisms have four or fewer."""
_MAX_TEXT = 4096
"""The most characters of a text without digest; texts of the mechanisms have a tenth."""
_THIS, _OTHER = -1, -2
_NO_NAMES: frozenset[Any] = frozenset()


def key(product: Product) -> str:
    """Return a text that is the same for equal formulas, and different for others.

    Raises:
        Unreadable: if a sum is over more axes than any mechanism has.
    """
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
