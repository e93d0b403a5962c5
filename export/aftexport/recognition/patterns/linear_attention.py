"""The pattern of linear attention, with or without eps; causal sums run up to u = t:

sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) V[b,u,h,e] / (sum_du phi(Q[b,t,h,d]) phi(K[b,u,h,d]) + eps)

``feature_products`` has the forms with other features, and without a normalizer.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import flat
from aftexport.recognition.formula.terms import Exp, Product, number
from aftexport.recognition.patterns._denominators import (
    denominator_of,
    refuse_changed_keys,
    refuse_cut_denominator,
    refuse_masked_denominator,
)
from aftexport.recognition.patterns._linear_parts import (
    Parts,
    is_causal_mask,
    refusal_of_normalizer,
)
from aftexport.recognition.patterns._token_axes import check_tokens
from aftexport.recognition.patterns.elementwise import Elementwise, classified
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
