"""The pattern of linear attention, with or without eps; causal sums run up to u = t:

sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) V[b,u,h,e] / (sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) + eps)

``feature_products`` has the forms with other features, and without a normalizer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aftexport.recognition.algebra import free
from aftexport.recognition.patterns._linear_parts import (
    Parts,
    is_causal_mask,
    refusal_of_normalizer,
)
from aftexport.recognition.patterns.channels import check_tokens
from aftexport.recognition.patterns.evaluation import Elementwise, classified
from aftexport.recognition.patterns.pattern import (
    OTHER_KEYS,
    OTHER_WEIGHTS,
    Factor,
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    aligned,
    leaves,
    refuse_changed_denominator,
    refuse_input_weights,
    single,
    size_of,
    sums,
    without,
)
from aftexport.recognition.terms import (
    Atom,
    Count,
    Exp,
    Function,
    Indicator,
    Leaf,
    Plus,
    Product,
    Sum,
    as_product,
    flat,
    number,
    single_atom,
)

FEATURE_MAPS: dict[str, Elementwise] = {
    "elu": lambda x: np.where(x > 0, x + 1.0, np.exp(np.minimum(x, 0.0))),
    "relu": lambda x: np.maximum(x, 0.0),
}
LOWEST_INPUT = -10.0
"""The lowest x for which elu(x) + 1 keeps enough digits of exp(x) in float64."""


def match(subject: Subject) -> Rewrite | None:
    """Return linear attention; see ``Pattern``."""
    formula = subject.formula
    refuse_cut_denominator(subject)
    numerators = sums(formula.factors, 1.0)
    if len(numerators) != 1 or len(formula.factors) != 2:
        return None
    body, bound = numerators[0].body, flat(numerators[0].axes)
    below = next(((a, p) for a, p in formula.factors if a is not numerators[0]), None)
    if below is None or below[1] != -1.0 or len(bound) < 2:
        return None
    denominator = denominator_of(below[0])
    fixed = denominator.fixed if denominator is not None else None
    if denominator is None or fixed is None:
        refuse_masked_denominator(below[0])
        refuse_changed_denominator(formula.factors)
        return None
    total, scale = fixed
    alignment = aligned(total, body, bound)
    if alignment is None:
        refuse_changed_keys(total)
        raise NearMissFound(OTHER_WEIGHTS)
    weights, value = alignment[0], without(body, alignment[0])
    if formula.coefficient == 1.0 != scale:
        raise NearMissFound("the denominator is scaled, and the numerator is not")
    if scale <= 0.0:
        raise NearMissFound("the denominator is negated")
    parts = _MappedParts(
        subject,
        weights,
        value,
        bound,
        denominator.normalizer,
        denominator.number / scale,
        formula.coefficient / scale,
    )
    for check in _CHECKS:
        if (reason := check(parts)) is None:
            continue
        if reason == _OTHER:
            return None
        raise NearMissFound(reason)
    return _rewrite(parts)


class _MappedParts(Parts):
    """Parts whose features are a function of query and key."""

    @cached_property
    def feature_map(self) -> tuple[str, Product, Product] | None:
        """The function that makes the features, and the query and key that it is applied to."""
        query, key = (_features(self.subject, product) for product in (self.query, self.key))
        if query is None or key is None or query[0] != key[0]:
            return None
        return query[0], query[1], key[1]


def _check_causal_masks(parts: _MappedParts) -> str | None:
    if any(is_causal_mask(parts.subject, atom) for atom, _ in parts.value.factors):
        return OTHER_KEYS
    return None


def _check_features(parts: _MappedParts) -> str | None:
    atoms = [atom for atom, _ in parts.features.factors]
    if not parts.summed or not parts.channels or len(atoms) < 2:
        return _OTHER
    # Softmax features are those of other mechanisms.
    return _OTHER if any(isinstance(atom, Exp) for atom in atoms) else None


def _check_score_mask(parts: _MappedParts) -> str | None:
    positions = set(parts.subject.axes) - free(parts.value)
    if free(parts.key_and_mask) & positions:
        return "the scores' mask is not known to be of the keys after the query"
    return None


def _check_roles(parts: _MappedParts) -> str | None:
    if parts.roles is None:
        return _OTHER
    if parts.causal_masks and parts.roles.are_other_tokens:
        return "the scores' mask is of keys that are more or fewer than the queries"
    return None


def _check_key_mask(parts: _MappedParts) -> str | None:
    refuse_input_weights(parts.mask)
    if len(parts.query.factors) != 1 or len(parts.key.factors) != 1:
        return _OTHER  # the features are multiplied by a tensor, which stays in the graph
    return None


def _check_feature_map(parts: _MappedParts) -> str | None:
    # Other features stay in the graph.
    return _OTHER if parts.feature_map is None else None


def _check_tokens(parts: _MappedParts) -> str | None:
    assert parts.roles is not None
    assert parts.feature_map is not None
    key = parts.feature_map[2]
    check_tokens(parts.subject, parts.roles.tokens, parts.summed, key, parts.channels)
    return None


_OTHER = "another mechanism"
"""The result of a check for a value that another pattern has the form of, or the reason."""
_CHECKS: Sequence[Callable[[_MappedParts], str | None]] = (
    _check_causal_masks,
    _check_features,
    _check_score_mask,
    _check_roles,
    _check_key_mask,
    _check_feature_map,
    _check_tokens,
    refusal_of_normalizer,
)
"""The conditions in order: each returns the reason of a near miss, ``_OTHER``, or None if it holds.

A check relies on those before it.
"""


def _rewrite(parts: _MappedParts) -> Rewrite:
    """Return the operator for parts that passed all checks."""
    assert parts.roles is not None
    assert parts.feature_map is not None
    roles = parts.roles
    name, query, key = parts.feature_map
    inputs = [value for formula in (query, key) for value in leaves(formula)]
    return Rewrite(
        "linear_attention",
        parts.operator,
        [
            Operand(query, (roles.batch, roles.tokens, (*roles.query_heads, *parts.channels))),
            # The logarithm of a masked weight is below that of every key with positive features.
            Operand(key, (roles.batch, parts.summed, (*roles.heads, *parts.channels)), parts.mask),
            Operand(parts.value, (roles.batch, parts.summed, (*roles.heads, *roles.wide))),
        ],
        (roles.batch, roles.tokens, (*roles.query_heads, *roles.wide)),
        parts.attributes(name, size_of(parts.channels)),
        lowest={value: LOWEST_INPUT for value in inputs if parts.subject.probed.is_float(value)},
        outside=number(parts.scale),
        has_key_lengths=roles.are_other_tokens,
        division=parts.division,
        note=parts.note,
    )


def _features(subject: Subject, product: Product) -> tuple[str, Product] | None:
    factor: Factor | None = single(product)
    return classified(subject, factor, FEATURE_MAPS) if factor is not None else None


@dataclass(frozen=True)
class Denominator:
    """A denominator that is a sum of terms, each with one sum over tokens."""

    normalizer: str  # ``add`` if the number is added to the terms, ``clamp`` if it is their minimum
    number: float
    terms: tuple[Product, ...]

    @property
    def fixed(self) -> tuple[Sum, float] | None:
        """The sum and its scale, None if there are several terms or other factors."""
        (term, *others) = self.terms
        if others or len(term.factors) != 1:
            return None
        total = term.factors[0][0]
        assert isinstance(total, Sum)
        return total, term.coefficient


def denominator_of(atom: Atom) -> Denominator | None:
    """Return the parts of a denominator, None for another formula."""
    if isinstance(atom, Function):
        return _clamped(atom)
    added = 0.0
    terms: list[Product] = []
    for term in atom.terms if isinstance(atom, Plus) else (as_product(atom),):
        if not term.factors:
            added += term.coefficient
        elif len(sums(term.factors, 1.0)) == 1:
            terms.append(term)
        else:
            return None
    return Denominator("add", added, tuple(terms)) if terms else None


def _clamped(function: Function) -> Denominator | None:
    """Return the parts of a denominator with a minimum, and with nothing that is added."""
    arguments, node = list(function.arguments), function.value and function.value.producer()
    if not node or node.op_type not in ("Clip", "Max") or len(arguments) != 2:
        return None
    if node.op_type == "Clip" and node.inputs[1] is None:
        return None  # a maximum
    numbers = [a for a in arguments if not a.factors]
    others = [a for a in arguments if a.factors]
    if len(numbers) != 1 or (node.op_type == "Clip" and arguments[1].factors):
        return None
    atom = single_atom(Product(others[0].factors))
    inner = denominator_of(atom) if atom is not None else None
    if others[0].coefficient != 1.0 or inner is None:
        term = others[0]
        fits = len(sums(term.factors, 1.0)) == 1
        return Denominator("clamp", numbers[0].coefficient, (term,)) if fits else None
    if inner.number or inner.normalizer != "add":
        return None
    return Denominator("clamp", numbers[0].coefficient, inner.terms)


def refuse_changed_keys(total: Sum) -> None:
    """Raise NearMissFound if numbers are added to the sum of keys that queries multiply."""
    for atom, _ in total.body.factors:
        terms = atom.terms if isinstance(atom, Plus) else ()
        constants = [term.coefficient for term in terms if not term.factors]
        if constants and any(sums(term.factors, 1.0) for term in terms):
            raise NearMissFound(
                f"{constants[0]:.3g} is added to the sum of the keys before queries multiply it:"
                " add it to the denominator"
            )


def refuse_masked_denominator(atom: Atom) -> None:
    """Raise NearMissFound if factors multiply the denominator before eps is added."""
    for term in atom.terms if isinstance(atom, Plus) else ():
        others = [a for a, _ in term.factors if not isinstance(a, Sum | Count)]
        if not sums(term.factors, 1.0) or not others:
            continue
        if any(isinstance(other, Indicator) for other in others):
            raise NearMissFound("the denominator is multiplied by a mask, and the numerator is not")
        names = [str(other.value.name) for other in others if isinstance(other, Leaf)]
        raise NearMissFound(
            f"the denominator is multiplied by {', '.join(names) or 'a tensor'} before eps is"
            " added: make it one of true and false, if it is a mask of queries"
        )


def refuse_cut_denominator(subject: Subject) -> None:
    """Raise NearMissFound if the denominator is cut out of a product of features and values."""
    for factor in subject.formula.factors:
        for leaf in leaves(Product((factor,))) if factor[1] == -1.0 else ():
            node = leaf.producer()
            if node is None or node.op_type != "Slice":
                continue
            product = subject.reader.read_separately(subject.reader.input(node, 0))
            for total in sums(product.factors, 1.0):
                mapped = any(isinstance(a, Function | Plus | Exp) for a, _ in total.body.factors)
                if mapped and len(flat(total.axes)) > 1:
                    raise NearMissFound(
                        "the denominator is cut out of a product of features and values, and is"
                        " not known to be of a column of ones after the values"
                    )
