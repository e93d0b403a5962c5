"""The first condition of a mechanism that a weighted sum over tokens fails.

It is computed for weighted sums that are neither a match nor a near miss of any pattern. The
weights of such a sum are described here too.
"""

from collections.abc import Iterator

from aftexport.recognition.algebra import free
from aftexport.recognition.graph.shape_probe import depends_on_inputs
from aftexport.recognition.patterns.channels import channel_axes
from aftexport.recognition.patterns.evaluation import NO_GATE, gate
from aftexport.recognition.patterns.pattern import Operand, Rewrite, Subject, is_condition, sums
from aftexport.recognition.terms import (
    Atom,
    Axis,
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
    flat,
)

PAIR_WEIGHTS = "the weights are of pairs of query and key, as in dot-product attention"
_CONSTANT_WEIGHTS = "the weights are constants, and not of keys"
_OTHER_WEIGHTS = "the weights are neither exponentials of keys nor products of features"
_ONE_ROW = "the weighted mean is one row for all tokens, as in pooling, and no gate makes more"
POOLING_CONDITIONS = frozenset((_CONSTANT_WEIGHTS, _OTHER_WEIGHTS, _ONE_ROW))
"""The conditions that the mean of a document fails, weighted or not."""


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


_FACTORS = 2
"""The factors of a weighted sum that depend on inputs: a weight and a value."""


def failed_condition(subject: Subject) -> str | None:
    """Return the condition that a weighted sum over tokens fails, None without such a sum."""
    factors = subject.formula.factors
    for total in sums(factors, 1.0):
        tokens = summed_tokens(subject, total)
        if len(weighed(total.body, tokens)) > 1:
            return _of_sum(subject, total, tokens)
    if any(_has_weighted_sum(subject, atom, 1) for atom, power in factors if power < 0.0):
        for atom, power in factors:
            if power > 0.0 and isinstance(atom, Plus) and _has_weighted_sum(subject, atom, 2):
                return "a term is added to the weighted sum before the division"
    return None


def layout_condition(rewrite: Rewrite) -> str:
    """Return why the operands of a rewrite cannot be written as tensors."""
    operands = [operand for operand in rewrite.operands if isinstance(operand, Operand)]
    parts = [a for o in operands for atom, _ in o.formula.factors for a in atoms_within(atom)]
    if any(isinstance(atom, Sum) for atom in parts):
        return "its query, key or value has a sum within, as a softmax of a softmax has"
    if any(isinstance(atom, Max) for atom in parts):
        return "its query, key or value has a maximum within, of something that no tensor holds"
    return "its tensors cannot be laid out as [B, T, D]"


def _has_weighted_sum(subject: Subject, atom: Atom, least: int) -> bool:
    """Return whether an atom is or adds a sum over tokens with ``least`` or more factors."""
    if isinstance(atom, Sum):
        return len(weighed(atom.body, summed_tokens(subject, atom))) >= least
    terms = atom.terms if isinstance(atom, Plus) else ()
    return any(_has_weighted_sum(subject, inner, least) for t in terms for inner, _ in t.factors)


def _of_sum(subject: Subject, total: Sum, tokens: set[Axis]) -> str:
    factors = weighed(total.body, tokens)
    divisors = [atom for atom, p in (*subject.formula.factors, *total.body.factors) if p < 0.0]
    normalizers = [atom for atom in divisors if _sums_tokens(subject, atom)]
    exponentials = [atom for atom in factors if isinstance(atom, Exp)]
    contracted = {*flat(total.axes)} - tokens
    if are_pairs(subject, total, tokens):
        return PAIR_WEIGHTS
    if not contracted and sum(map(depends_on_inputs_within, factors)) < _FACTORS:
        return _CONSTANT_WEIGHTS
    if not exponentials and not contracted:
        functions = filter(None, map(applied_function, factors))
        if (function := next(functions, None)) is not None:
            return f"the weights go through {function} before they weigh the values"
        return _OTHER_WEIGHTS
    if not normalizers:
        return "nothing divides the weighted sum by the sum of its weights"
    if not exponentials or contracted:
        return _of_features(subject, bool(exponentials))
    if sum(_sums_exponentials(atom) for atom in divisors) > 1:
        return "more than one sum divides the weights, as where they are normalized over two axes"
    if not rows_of(subject, total, tokens):
        return _ONE_ROW
    return _of_gate(subject)


def _of_features(subject: Subject, exponential: bool) -> str:
    if exponential:
        return "the features are exponentials that are not normalized one by one"
    if len(subject.formula.factors) != 2:
        return "more than the sum of the weights divides the weighted sum, or multiplies it"
    return "query, key and value do not share heads and tokens as they should"


def _of_gate(subject: Subject) -> str:
    gates = [f for f in subject.formula.factors if isinstance(f[0], Leaf | Function | Plus)]
    if not gates:
        return "no gate multiplies the weighted mean"
    if gate(subject, gates) is None:
        return NO_GATE
    return "the weights have other axes than batch, tokens and the channels of the values"


def _sums_exponentials(atom: Atom) -> bool:
    return isinstance(atom, Sum) and any(isinstance(inner, Exp) for inner, _ in atom.body.factors)


def _sums_tokens(subject: Subject, atom: Atom) -> bool:
    """Return whether an atom is a sum over tokens, or is made of one."""
    if isinstance(atom, Sum):
        return bool(summed_tokens(subject, atom))
    return any(_sums_tokens(subject, a) for part in _inner_parts(atom) for a, _ in part.factors)


def _inner_parts(atom: Atom) -> tuple[Product, ...]:
    return () if isinstance(atom, Sum) else parts_of(atom)
