"""The pattern of Efficient Attention; a softmax over other axes is another function:

scale * sum_du softmax_d(Q[b,t,h,d]) softmax_u(K[b,u,h,d]) V[b,u,h,e]
"""

from collections.abc import Sequence

from aftexport.recognition.algebra import free
from aftexport.recognition.patterns._linear_parts import is_causal_mask
from aftexport.recognition.patterns.channels import Roles, check_tokens, roles_of
from aftexport.recognition.patterns.failed_conditions import applied_function, summed_tokens
from aftexport.recognition.patterns.pattern import (
    OTHER_KEYS,
    NearMissFound,
    Operand,
    Rewrite,
    Subject,
    aligned,
    check_maxima,
    holds_infinity,
    logits_of,
    refuse_changed_denominator,
    refuse_clamped,
    size_of,
    sums,
    without,
    zeroed,
)
from aftexport.recognition.terms import Axis, Exp, Indicator, Product, Sum, as_product, flat


def match(subject: Subject) -> Rewrite | None:
    """Return Efficient Attention; see ``Pattern``."""
    formula = subject.formula
    numerators, outer = sums(formula.factors, 1.0), sums(formula.factors, -1.0)
    if len(numerators) != 1 or len(formula.factors) != 1 + len(outer):
        return None
    body, bound = numerators[0].body, flat(numerators[0].axes)
    inner = sums(body.factors, -1.0)
    normalizers = [n for n in (*inner, *outer) if _is_of_weights(n.body)]
    if len(bound) > 1 and len(normalizers) == 1:
        refuse_changed_denominator(body.factors)
    _refuse_one_softmax(numerators[0], normalizers)
    if len(bound) < 2 or len(normalizers) != 2 or len(inner) + len(outer) != 2:
        return None
    # Where every size is fixed, tokens and channels look alike.
    dynamic = {a for a in summed_tokens(subject, numerators[0]) if not a.is_fixed}
    _refuse_one_exponential(numerators[0], dynamic)
    if len(inner) != 1:
        raise NearMissFound("the two softmaxes are not over the query's channels and the tokens")
    queries, keys = aligned(outer[0], body, bound), aligned(inner[0], body, bound)
    if queries is None or keys is None or queries[1] & keys[1]:
        raise NearMissFound("a softmax is over another axis than the product that reads it")
    query, channels = queries
    key, summed = keys[0], tuple(a for a in bound if a in keys[1])
    value = without(without(without(body, query), key), Product(((inner[0], -1.0),)))
    if any(is_causal_mask(subject, atom) for atom, _ in value.factors):
        raise NearMissFound(OTHER_KEYS)
    roles = roles_of(subject, query, key, value, channels, summed)
    if roles is None:
        raise NearMissFound("query, key and value do not share heads and tokens as they should")
    refuse_clamped(key)
    refuse_clamped(query, "the queries")
    check_maxima(subject, normalizers)
    check_tokens(subject, roles.tokens, summed, key, channels)
    if any(isinstance(atom, Indicator) for atom, _ in query.factors):
        raise NearMissFound("channels of the query are left out of its softmax")
    order = tuple(a for a in flat(bound) if a in channels)
    scale = formula.coefficient * body.coefficient
    return _rewrite(subject, (query, key, value), roles, (summed, order), scale)


def _rewrite(
    subject: Subject,
    operands: tuple[Product, Product, Product],
    roles: Roles,
    # The axes of the keys' positions, and of the channels of query and key.
    bound: tuple[tuple[Axis, ...], tuple[Axis, ...]],
    scale: float,
) -> Rewrite:
    query, key, value = operands
    summed, channels = bound
    query_logits, key_logits = logits_of(query), logits_of(key)
    return Rewrite(
        "efficient_attention",
        "EfficientAttention",
        [
            Operand(
                query_logits,
                (roles.batch, roles.tokens, (*roles.query_heads, *channels)),
                floored=holds_infinity(query_logits, subject.probed),
            ),
            Operand(
                key_logits,
                (roles.batch, summed, (*roles.heads, *channels)),
                Product(tuple(f for f in key.factors if isinstance(f[0], Indicator))),
                floored=holds_infinity(key_logits, subject.probed),
            ),
            Operand(
                zeroed(Product(value.factors), key, subject.reader),
                (roles.batch, summed, (*roles.heads, *roles.wide)),
            ),
        ],
        (roles.batch, roles.tokens, (*roles.query_heads, *roles.wide)),
        {**roles.attributes(size_of(channels)), "normalization": "softmax", "scale": scale},
        has_key_lengths=roles.are_other_tokens,
    )


def _refuse_one_softmax(numerator: Sum, normalizers: Sequence[Sum]) -> None:
    """Raise NearMissFound if only one of query and key has a softmax."""
    body, bound = numerator.body, flat(numerator.axes)
    alignment = aligned(normalizers[0], body, bound) if len(normalizers) == 1 else None
    if alignment is None or not alignment[1] < set(bound):
        return
    others = set(bound) - alignment[1]
    readers = [
        atom for atom, _ in without(body, alignment[0]).factors if free(as_product(atom)) & others
    ]
    if any(isinstance(atom, Exp) for atom in readers):
        return
    function = next(filter(None, map(applied_function, readers)), None)
    if normalizers[0] not in sums(body.factors, -1.0):
        if function is not None:
            raise NearMissFound(f"the softmax of the keys goes through {function}")
        raise NearMissFound("the keys are not normalized by a softmax over the tokens")
    if others & free(alignment[0]):
        if function is not None:
            raise NearMissFound(f"the softmax of the query goes through {function}")
        raise NearMissFound("the query is not normalized by a softmax over its channels")


def _refuse_one_exponential(numerator: Sum, tokens: set[Axis]) -> None:
    """Raise NearMissFound if both softmaxes are of the keys, or of the query."""
    exponentials = [atom for atom, _ in numerator.body.factors if isinstance(atom, Exp)]
    of_keys = [bool(free(as_product(atom)) & tokens) for atom in exponentials]
    if tokens and all(of_keys):
        raise NearMissFound("the query is not normalized by a softmax over its channels")
    if tokens and not any(of_keys):
        raise NearMissFound("the keys are not normalized by a softmax over the tokens")


def _is_of_weights(body: Product) -> bool:
    """Return whether a formula is a product of exponentials and masks."""
    atoms = [atom for atom, _ in body.factors]
    exponentials = [atom for atom in atoms if isinstance(atom, Exp)]
    return bool(exponentials) and all(isinstance(a, Exp | Indicator) for a in atoms)
