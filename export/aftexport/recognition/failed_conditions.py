"""The first condition of a mechanism that a weighted sum over tokens fails.

It is computed for weighted sums that are neither a match nor a near miss of any pattern.
"""

from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import (
    Atom,
    Exp,
    Function,
    Leaf,
    Max,
    Plus,
    Product,
    Sum,
)
from aftexport.recognition.patterns.elementwise import NO_GATE, gate
from aftexport.recognition.patterns.pattern import Operand, Rewrite, Subject, sums
from aftexport.recognition.patterns.weights import (
    PAIR_WEIGHTS,
    applied_function,
    are_pairs,
    atoms_within,
    depends_on_inputs_within,
    parts_of,
    rows_of,
    summed_tokens,
    weighed,
)

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
        return "the weights are constants, and not of keys"
    if not exponentials and not contracted:
        functions = filter(None, map(applied_function, factors))
        if (function := next(functions, None)) is not None:
            return f"the weights go through {function} before they weigh the values"
        return "the weights are neither exponentials of keys nor products of features"
    if not normalizers:
        return "nothing divides the weighted sum by the sum of its weights"
    if not exponentials or contracted:
        return _of_features(subject, bool(exponentials))
    if sum(_sums_exponentials(atom) for atom in divisors) > 1:
        return "more than one sum divides the weights, as where they are normalized over two axes"
    if not rows_of(subject, total, tokens):
        return "the weighted mean is one row for all tokens, as in pooling, and no gate makes more"
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
