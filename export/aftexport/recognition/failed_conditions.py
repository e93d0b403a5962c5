"""Why a weighted sum over tokens is not a mechanism: the first condition that it fails.

Asked of what no pattern took and none called a near miss.
"""

from collections.abc import Iterator

from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import (
    Atom,
    Exp,
    Function,
    Leaf,
    Over,
    Plus,
    Product,
    UpTo,
    Window,
    one,
)
from aftexport.recognition.graph.shape_probe import rests_on_inputs
from aftexport.recognition.patterns.channels import channel_axes
from aftexport.recognition.patterns.pattern import Subject, is_condition, leaves, sums


def failed_condition(subject: Subject) -> str | None:
    """Return the condition that a weighted sum over tokens fails, None without such a sum.

    Args:
        subject: the value that is or has the sum.
    """
    factors = subject.formula.factors
    for total in sums(factors, 1.0):
        tokens = _summed_tokens(subject, total)
        if len(_weighed(total.body, tokens)) > 1:
            return _of_sum(subject, total, tokens)
    divided = any(_has_weighted_sum(subject, atom) for atom, power in factors if power < 0.0)
    for atom, power in factors:
        if power > 0.0 and divided and _has_weighted_sum(subject, atom):
            return "something is added to the weighted sum before it is divided"
    return None


def _has_weighted_sum(subject: Subject, atom: Atom) -> bool:
    if isinstance(atom, Over):
        return bool(_weighed(atom.body, _summed_tokens(subject, atom)))
    terms = atom.terms if isinstance(atom, Plus) else ()
    return any(_has_weighted_sum(subject, inner) for t in terms for inner, _ in t.factors)


def _summed_tokens(subject: Subject, total: Over) -> set[Axis]:
    """The axes of a sum that can be tokens: those of any size, or else those of no layer."""
    bound = set(flat(total.axes))
    moving = {axis for axis in bound if not axis.is_fixed}
    if moving or any(not axis.is_fixed for axes in subject.dims[1:] for axis in flat(axes)):
        return moving
    return bound - channel_axes(total.body, subject.reader)


def _weighed(body: Product, tokens: set[Axis]) -> list[Atom]:
    """Factors of a sum over tokens, but for masks: weights, and what they weigh."""
    return [
        atom
        for atom, power in body.factors
        if (power > 0.0 or isinstance(atom, Exp))
        and free(one(atom)) & tokens
        and not isinstance(atom, UpTo | Window)
        and not is_condition(atom)
    ]


def _of_sum(subject: Subject, total: Over, tokens: set[Axis]) -> str:
    weighed = _weighed(total.body, tokens)
    divisors = [atom for atom, p in (*subject.formula.factors, *total.body.factors) if p < 0.0]
    normalisers = [atom for atom in divisors if _sums_tokens(subject, atom)]
    exponentials = [atom for atom in weighed if isinstance(atom, Exp)]
    contracted = {*flat(total.axes)} - tokens
    constant = [a for a in weighed if not _rests_on_inputs(one(a))]
    rows = _rows(subject, tokens)
    if any(free(one(a)) & rows and _rests_on_inputs(one(a)) for a in exponentials):
        return "the weights are of pairs of query and key, as in dot-product attention"
    if constant and not contracted:
        return "the weights are constants, and not of keys"
    if not exponentials and not contracted:
        return "the weights are neither exponentials of keys nor products of features"
    if not normalisers:
        return "nothing divides the weighted sum by the sum of its weights"
    if not exponentials or contracted:
        return _of_features(subject, bool(exponentials))
    if not rows:
        return "the weighted mean is one row for all tokens, as in pooling, and no gate makes more"
    return _of_gate(subject)


def _rests_on_inputs(product: Product) -> bool:
    bodies = [atom.body for atom in _sums_within(product)]
    return any(rests_on_inputs(value) for part in (product, *bodies) for value in leaves(part))


def _sums_within(product: Product) -> Iterator[Over]:
    for atom, _ in product.factors:
        if isinstance(atom, Over):
            yield atom
        for inner in _parts(atom):
            yield from _sums_within(inner)


def _of_features(subject: Subject, exponential: bool) -> str:
    if exponential:
        return "the features are exponentials that are not normalised one by one"
    if len(subject.formula.factors) != 2:
        return "more than the sum of the weights divides the weighted sum, or multiplies it"
    return "query, key and value do not share heads and tokens as they should"


def _of_gate(subject: Subject) -> str:
    gates = [a for a, _ in subject.formula.factors if isinstance(a, Leaf | Function | Plus)]
    if gates:
        return "what multiplies the mean is neither sigmoid nor tanh of one tensor"
    return "no gate multiplies the weighted mean"


def _sums_tokens(subject: Subject, atom: Atom) -> bool:
    """Whether something is a sum over tokens, or made of one."""
    if isinstance(atom, Over):
        return bool(_summed_tokens(subject, atom))
    return any(_sums_tokens(subject, a) for part in _parts(atom) for a, _ in part.factors)


def _parts(atom: Atom) -> tuple[Product, ...]:
    match atom:
        case Plus(terms=parts) | Function(arguments=parts):
            return parts
        case Exp(argument=part):
            return (part,)
    return ()


def _rows(subject: Subject, tokens: set[Axis]) -> set[Axis]:
    """The axes of a value that have as many entries as are summed."""
    sizes = {axis.sizes for axis in tokens}
    return {axis for axis in subject.axes if axis.sizes in sizes}
