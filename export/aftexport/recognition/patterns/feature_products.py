"""The pattern of linear attention with any features, which stay in the graph:

sum_du Q[b,t,h,d] K[b,u,h,d] V[b,u,h,e] / n(sum_du Q[b,t,h,d] K[b,u,h,d])

n(z) is z + eps or max(z, eps). Without a denominator, or with another one, the operator is the
product alone, and the rest stays in the graph too. Both may also be sums over parts of the features
with the same values, which are then put side by side.

The formula of the subject ends at features: functions of queries and keys are leaves.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aftexport.recognition.algebra import free, key, multiply, substitute
from aftexport.recognition.patterns._linear_parts import (
    Parts,
    is_causal_mask,
    refusal_of_normalizer,
)
from aftexport.recognition.patterns.channels import channel_axes, check_tokens
from aftexport.recognition.patterns.evaluation import classified
from aftexport.recognition.patterns.failed_conditions import atoms_within, depends_on_inputs_within
from aftexport.recognition.patterns.linear_attention import (
    FEATURE_MAPS,
    LOWEST_INPUT,
    Denominator,
    denominator_of,
    refuse_changed_keys,
)
from aftexport.recognition.patterns.pattern import (
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    aligned,
    is_condition,
    is_held,
    leaves,
    refuse_changed_denominator,
    refuse_input_weights,
    renamings,
    size_of,
    sums,
    within,
    without,
    without_outside,
)
from aftexport.recognition.terms import (
    ONE,
    Atom,
    Axis,
    Count,
    Function,
    Leaf,
    Plus,
    Product,
    Sum,
    as_product,
    flat,
    number,
    single_atom,
)


def match(subject: Subject) -> Rewrite | None:
    """Return linear attention of features; see ``Pattern``."""
    bare, outside = without_outside(subject)
    above = [a for a, power in bare.formula.factors if power == 1.0 and _terms(a) is not None]
    below = [a for a, power in bare.formula.factors if power == -1.0 and _sums_features(a)]
    if len(above) != 1 or len(below) > 1:
        return None
    terms = _terms(above[0])
    assert terms is not None
    rest = tuple(f for f in bare.formula.factors if f[0] not in (*above, *below))
    outside = multiply(outside, Product(rest))
    if not below:
        return _product(bare, terms, outside)
    if all(len(flat(_sum(term).axes)) < 2 for term in terms):
        return None
    reason = ""
    try:
        denominator = denominator_of(below[0])
        if denominator is None:
            refuse_changed_denominator(bare.formula.factors)
        elif (whole := _quotient(bare, terms, denominator, outside)) is not None:
            return whole
    except NearMissFound as miss:
        reason = str(miss)
    part = _product(bare, terms, outside, below[0]) if is_held(below[0]) else None
    if part is None and reason:
        raise NearMissFound(reason)
    return part if part is None else replace(part, note=reason)


def _sums_features(atom: Atom) -> bool:
    """Return whether an atom has a sum in it, as a denominator has."""
    return any(isinstance(inner, Sum) for inner in atoms_within(atom))


def _are_outside(outside: Product) -> bool:
    """Return whether factors can multiply the result of an operator."""
    return all(
        isinstance(atom, Count)
        or is_condition(atom)
        or (isinstance(atom, Leaf) and not any(a.is_fixed for a in free(as_product(atom))))
        or not depends_on_inputs_within(atom)
        for atom, _ in outside.factors
    )


def _terms(atom: object) -> tuple[Product, ...] | None:
    """Return the terms of a numerator, each with one sum; None for another formula."""
    if isinstance(atom, Sum):
        return (as_product(atom),)
    if isinstance(atom, Plus) and all(len(sums(t.factors, 1.0)) == 1 for t in atom.terms):
        return atom.terms
    return None


def _sum(term: Product) -> Sum:
    (total,) = sums(term.factors, 1.0)
    return total


def _outer(term: Product) -> Product:
    """Return the factors of a term beside its sum, without its coefficient."""
    return Product(tuple(f for f in term.factors if f[0] is not _sum(term)))


def _quotient(
    subject: Subject, terms: Sequence[Product], denominator: Denominator, outside: Product
) -> Rewrite | None:
    """Return the operator for a product that is divided by a normalizer."""
    paired = _paired(terms, denominator.terms)
    if paired is None:
        refuse_changed_keys(_sum(denominator.terms[0]))
        raise NearMissFound("numerator and denominator have different weights")
    scales = {above.coefficient / below.coefficient for above, below, _ in paired}
    by = paired[0][1].coefficient
    if by <= 0.0:
        raise NearMissFound("the denominator is negated")
    if len(scales) > 1:
        raise NearMissFound("the parts of numerator and denominator have different scales")
    coefficient = subject.formula.coefficient * scales.pop()
    if coefficient * by == 1.0 != by:
        raise NearMissFound("the denominator is scaled, and the numerator is not")
    found: list[_Operands] = []
    for _, below, (weights, total) in paired:
        outer = _outer(below)
        if len(terms) == 1:
            # Factors of both sums are those of the queries; the others multiply the result.
            if not within(outer, outside):
                raise NearMissFound(
                    "the denominator is multiplied by a tensor, and the numerator is not"
                )
            outside = without(outside, outer)
        parts = Parts(
            subject,
            weights,
            without(total.body, weights),
            flat(total.axes),
            denominator.normalizer,
            denominator.number / by,
            coefficient,
        )
        operands = _operands(parts, multiply(outer, number(below.coefficient / by)))
        if operands is None:
            return None
        found.append(operands)
    return _rewrite(found, outside)


def _paired(
    terms: Sequence[Product], below: Sequence[Product]
) -> list[tuple[Product, Product, tuple[Product, Sum]]] | None:
    """Return each term of a numerator with its term of the denominator, None if they do not fit.

    The last entry has the weights that both share, in the axes of the numerator's sum.
    """
    left, pairs = list(below), []
    for term in terms:
        total = _sum(term)
        for other in left:
            alignment = aligned(_sum(other), total.body, flat(total.axes))
            if alignment is None or alignment[1] != {*flat(total.axes)}:
                continue
            if len(terms) > 1 and key(_outer(term)) != key(_outer(other)):
                continue
            pairs.append((term, other, (alignment[0], total)))
            left.remove(other)
            break
        else:
            return None
    return None if left else pairs


@dataclass(frozen=True)
class _Operands:
    """The factors of query, key and value of one product."""

    parts: Parts
    query: Product
    key: Product  # the features of the key, with masks


def _operands(parts: Parts, outer: Product) -> _Operands | None:
    """Return the operands of a product, None for another formula; raises NearMissFound."""
    if any(is_causal_mask(parts.subject, atom) for atom, _ in parts.value.factors):
        raise NearMissFound("numerator and denominator are sums over different keys")
    if not parts.summed or not parts.channels or not parts.query.factors:
        return None
    positions = set(parts.subject.axes) - free(parts.value)
    if free(parts.key_and_mask) & positions:
        return None
    query = multiply(parts.query, outer)
    roles = parts.roles
    if roles is None or (parts.causal_masks and roles.are_other_tokens):
        return None
    if free(query) - {*roles.tokens, *roles.batch, *roles.query_heads, *parts.channels}:
        return None
    refuse_input_weights(parts.mask)
    check_tokens(parts.subject, roles.tokens, parts.summed, parts.key, parts.channels)
    if (reason := refusal_of_normalizer(parts)) is not None:
        raise NearMissFound(reason)
    return _Operands(parts, query, parts.key_and_mask)


def _product(
    subject: Subject, terms: Sequence[Product], outside: Product, divisor: Atom | None = None
) -> Rewrite | None:
    """Return the operator for a product, whose divisor stays in the graph if there is one."""
    (term, *others) = terms
    total = _sum(term)
    body, bound = total.body, flat(total.axes)
    if others or len(bound) < 2:
        return None
    masks = Product(tuple(f for f in body.factors if is_causal_mask(subject, f[0])))
    scale = subject.formula.coefficient * body.coefficient
    for summed in _sums_over_tokens(subject, without(body, masks), bound):
        value = _value(without(body, masks), summed, {*bound} - {*summed})
        if value is None:
            continue
        parts = Parts(subject, without(body, value), value, bound, "none", 1.0, scale)
        operands = _operands(parts, ONE)
        if operands is not None:
            rewrite = _rewrite([operands], outside)
            if rewrite is None or divisor is None:
                return rewrite and replace(rewrite, is_part=True)
            below = Product(((divisor, -1.0),))
            return replace(rewrite, outside=multiply(rewrite.outside, below), is_part=True)
    return None


def _sums_over_tokens(
    subject: Subject, body: Product, bound: tuple[Axis, ...]
) -> Iterator[tuple[Axis, ...]]:
    """Yield the axes of a sum that can be the keys' positions, the most likely first."""
    moving = {axis for axis in bound if not axis.is_fixed}
    fixed = [axis for axis in bound if axis.is_fixed]
    if moving:
        for count in range(len(fixed)):
            for some in itertools.combinations(fixed, count):
                yield tuple(axis for axis in bound if axis in moving or axis in some)
        return
    channels = channel_axes(body, subject.reader)
    others = tuple(axis for axis in bound if axis not in channels)
    if others and len(others) < len(bound):
        yield others
        if len(others) > 1:
            # Pairs of channels that a rotation puts side by side are not known to be channels.
            yield from ((axis,) for axis in others)


def _value(body: Product, summed: tuple[Axis, ...], channels: set[Axis]) -> Product | None:
    """Return the factors of a product that are the values, None if there are none."""
    keys = Product(tuple(f for f in body.factors if free(as_product(f[0])) & channels))
    known = free(keys)
    factors = tuple(
        f for f in body.factors if f not in keys.factors and not free(as_product(f[0])) <= known
    )
    value = Product(factors)
    return value if {*summed} <= free(value) else None


def _rewrite(found: Sequence[_Operands], outside: Product) -> Rewrite | None:
    """Return the operator for products with the same values, None if the values differ."""
    if not _are_outside(outside):
        return None
    first = found[0].parts
    for other in found[1:]:
        names = renamings(other.parts.summed, first.summed)
        if not any(key(substitute(other.parts.value, n)) == key(first.value) for n in names):
            return None
    roles = first.roles
    assert roles is not None
    batch = roles.batch
    queries = [(o.query, (batch, roles.tokens, roles.query_heads, _channels(o))) for o in found]
    keys = [(o.key, (batch, o.parts.summed, roles.heads, _channels(o))) for o in found]
    rewrite = Rewrite(
        "linear_attention",
        first.operator,
        [
            _operand(queries),
            _operand(keys),
            Operand(first.value, (batch, first.summed, (*roles.heads, *roles.wide))),
        ],
        (batch, roles.tokens, (*roles.query_heads, *roles.wide)),
        first.attributes("identity", sum(size_of(o.parts.channels) for o in found)),
        outside=multiply(outside, number(first.scale)),
        has_key_lengths=roles.are_other_tokens,
        division=first.division,
        note=first.note,
    )
    return _with_feature_map(first.subject, rewrite)


def _with_feature_map(subject: Subject, rewrite: Rewrite) -> Rewrite:
    """Return a rewrite that computes its features too, if the operator has their function."""
    query, keys, value = rewrite.operands
    assert isinstance(query, Operand)
    assert isinstance(keys, Operand)
    mapped = [_mapped(subject, operand.formula) for operand in (query, keys)]
    if query.joined or mapped[0] is None or mapped[1] is None or mapped[0][0] != mapped[1][0]:
        return rewrite
    (name, of_query), (_, of_keys) = mapped[0], mapped[1]
    inputs = [*leaves(of_query), *leaves(of_keys)]
    return replace(
        rewrite,
        operands=[replace(query, formula=of_query), replace(keys, formula=of_keys), value],
        attributes={**rewrite.attributes, "feature_map": name},
        opened=[*leaves(query.formula), *leaves(keys.formula)],
        lowest={v: LOWEST_INPUT for v in inputs if subject.probed.is_float(v)},
    )


def _mapped(subject: Subject, features: Product) -> tuple[str, Product] | None:
    """Return the function of the operator that features are, and its argument."""
    atom = single_atom(features)
    if not is_held(atom):
        return None
    function = Function("", (), atom.value, atom.dims)
    return classified(subject, (function, 1.0), FEATURE_MAPS)


def _channels(operands: _Operands) -> tuple[Axis, ...]:
    return tuple(operands.parts.channels)


_Grouped = tuple[Product, tuple[tuple[Axis, ...], ...]]


def _operand(parts: Sequence[_Grouped]) -> Operand:
    """Return the operand of features, whose parts are side by side in each head."""
    if len(parts) > 1:
        return Operand(*parts[0], joined=parts[1:])
    formula, (batch, tokens, heads, channels) = parts[0]
    return Operand(formula, (batch, tokens, (*heads, *channels)))
