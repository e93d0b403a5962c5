"""The weights of a sum over tokens, for the reasons why a sum is not a mechanism."""

from collections.abc import Iterator

from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import (
    Atom,
    CausalMask,
    Exp,
    Function,
    Indicator,
    Leaf,
    Max,
    Plus,
    Product,
    Sum,
    Window,
    as_product,
)
from aftexport.recognition.graph.shape_probe import depends_on_inputs
from aftexport.recognition.patterns.channels import channel_axes
from aftexport.recognition.patterns.pattern import Subject, is_condition, sums

PAIR_WEIGHTS = "the weights are of pairs of query and key, as in dot-product attention"


def summed_tokens(subject: Subject, total: Sum) -> set[Axis]:
    """Return the axes of a sum that can be tokens: dynamic ones, or those that no layer makes."""
    bound = set(flat(total.axes))
    moving = {axis for axis in bound if not axis.is_fixed}
    if moving or any(not axis.is_fixed for axes in subject.dims[1:] for axis in flat(axes)):
        return moving
    return bound - channel_axes(total.body, subject.reader)


def weighed(body: Product, tokens: set[Axis]) -> list[Atom]:
    """Return the factors of a sum over tokens without masks: weights and values."""
    return [
        atom
        for atom, power in body.factors
        if (power > 0.0 or isinstance(atom, Exp))
        and free(as_product(atom)) & tokens
        and not isinstance(atom, CausalMask | Window)
        and not is_condition(atom)
    ]


def has_values(body: Product, tokens: set[Axis]) -> bool:
    """Return whether a sum of exponentials over tokens has values that depend on inputs."""
    return any(
        not isinstance(a, Exp) and depends_on_inputs_within(a) for a in weighed(body, tokens)
    )


def depends_on_inputs_within(atom: Atom) -> bool:
    """Return whether an atom depends on the numbers in the inputs."""
    return any(
        isinstance(inner, Leaf | Indicator) and depends_on_inputs(inner.value)
        for inner in atoms_within(atom)
    )


def rows_of(subject: Subject, total: Sum, tokens: set[Axis]) -> set[Axis]:
    """Return the axes of a value that have as many entries as are summed, and can be tokens."""
    sizes = {axis.sizes for axis in tokens}
    others = {*flat(subject.dims[0])} | channel_axes(total.body, subject.reader)
    return {axis for axis in subject.axes if axis.sizes in sizes and axis not in others}


def has_pairs(subject: Subject) -> bool:
    """Return whether a value is a sum over tokens with weights of pairs of query and key."""
    return any(
        are_pairs(subject, total, tokens)
        for total in sums(subject.formula.factors, 1.0)
        if len(weighed(total.body, tokens := summed_tokens(subject, total))) > 1
    )


def are_pairs(subject: Subject, total: Sum, tokens: set[Axis]) -> bool:
    """Return whether weights in a sum depend on the row of the result and on that of the key.

    Such weights are exponentials, and tensors that have both rows.
    """
    rows = rows_of(subject, total, tokens)
    for atom in weighed(total.body, tokens):
        if isinstance(atom, Leaf) and _depends_on_rows(atom, rows):
            return True
        for inner in atoms_within(atom):
            if not isinstance(inner, Exp) or not free(as_product(inner)) & tokens:
                continue
            if any(_depends_on_rows(leaf, rows) for leaf in atoms_within(inner)):
                return True
            if _axes_beside_keys(inner, tokens).intersection(subject.axes):
                return True
    return False


def _axes_beside_keys(weight: Exp, tokens: set[Axis]) -> set[Axis]:
    """Return axes of queries in a weight: of its inputs without keys, and not of those with keys.

    They may have another size than the keys, as in cross-attention.
    """
    inputs = [
        free(as_product(leaf))
        for leaf in atoms_within(weight)
        if isinstance(leaf, Leaf) and depends_on_inputs(leaf.value)
    ]
    of_keys = {axis for axes in inputs if axes & tokens for axis in axes}
    return {axis for axes in inputs if not axes & tokens for axis in axes} - of_keys


def _depends_on_rows(atom: Atom, rows: set[Axis]) -> bool:
    return (
        isinstance(atom, Leaf)
        and bool(free(as_product(atom)) & rows)
        and depends_on_inputs(atom.value)
    )


def applied_function(atom: Atom) -> str | None:
    """Return the function of exponentials or quotients that makes weights, None without one.

    Its name is that of the reason, such as ``Clip``, or ``nan_to_num`` of a guard of NaN.
    """
    if not isinstance(atom, Function | Plus):
        return None
    inner = list(atoms_within(atom))
    quotients = [p for part in _products_within(atom) for _, p in part.factors if p < 0.0]
    if not quotients and not any(isinstance(a, Exp) for a in inner):
        return None
    if any(_tells_nan(a) for a in inner):
        return "nan_to_num, or another guard of NaN"
    return atom.name.partition("{")[0] if isinstance(atom, Function) else "a sum"


def _tells_nan(atom: Atom) -> bool:
    node = atom.value.producer() if isinstance(atom, Indicator) else None
    return node is not None and (
        node.op_type == "IsNaN" or (node.op_type == "Equal" and node.inputs[0] is node.inputs[1])
    )


def atoms_within(atom: Atom) -> Iterator[Atom]:
    """Yield an atom and all atoms that it is made of."""
    yield atom
    for part in parts_of(atom):
        for inner, _ in part.factors:
            yield from atoms_within(inner)


def _products_within(atom: Atom) -> Iterator[Product]:
    for inner in atoms_within(atom):
        yield from parts_of(inner)


def parts_of(atom: Atom) -> tuple[Product, ...]:
    """Return the formulas that an atom is made of, except a maximum, which only shifts logits."""
    return () if isinstance(atom, Max) else atom.children
