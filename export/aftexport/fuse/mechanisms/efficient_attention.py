"""Efficient Attention, by its formula; the other axes are another function:

scale * sum_du softmax_d(Q[b,t,h,d]) softmax_u(K[b,u,h,d]) V[b,u,h,e]
"""

from aftexport.fuse.algebra import Exp, Product, free
from aftexport.fuse.axes import Axis, flat
from aftexport.fuse.pattern import (
    NearMissError,
    Operand,
    Rewrite,
    Subject,
    aligned,
    check_maxima,
    check_tokens,
    holds_infinity,
    logits_of,
    packed,
    refuse_clamped,
    same_size,
    size_of,
    sums,
    without,
)


def match(subject: Subject) -> Rewrite | None:
    """See ``Pattern``."""
    formula = subject.formula
    numerators, outer = sums(formula.factors, 1.0), sums(formula.factors, -1.0)
    if len(numerators) != 1 or len(formula.factors) != 1 + len(outer):
        return None
    body, bound = numerators[0].body, flat(numerators[0].axes)
    inner = sums(body.factors, -1.0)
    normalisers = [n for n in (*inner, *outer) if all(_is_exp(a) for a, _ in n.body.factors)]
    if len(bound) < 2 or len(normalisers) != 2 or len(inner) + len(outer) != 2:
        return None
    if len(inner) != 1:
        raise NearMissError("the two softmaxes are not over the query's channels and the tokens")
    queries, keys = aligned(outer[0], body, bound), aligned(inner[0], body, bound)
    if queries is None or keys is None or queries[1] & keys[1]:
        raise NearMissError("a softmax is over another axis than the product that reads it")
    query, channels = queries
    key, summed = keys[0], tuple(a for a in bound if a in keys[1])
    value = without(without(without(body, query), key), Product(((inner[0], -1.0),)))
    roles = _roles(subject, query, key, value, channels, summed)
    if roles is None:
        raise NearMissError("query, key and value do not share heads and tokens as they should")
    tokens, heads, batch, wide = roles
    refuse_clamped(key)
    refuse_clamped(query)
    check_maxima(subject, normalisers)
    check_tokens(subject, tokens, summed, key)
    order = tuple(a for a in flat(bound) if a in channels)
    key_logits, query_logits = logits_of(key), logits_of(query)
    measured = subject.measured
    scale = formula.coefficient * body.coefficient
    return Rewrite(
        "efficient_attention",
        "EfficientAttention",
        [
            Operand(
                query_logits,
                (batch, tokens, (*heads, *order)),
                floored=holds_infinity(query_logits, measured),
            ),
            Operand(
                key_logits,
                (batch, summed, (*heads, *order)),
                floored=holds_infinity(key_logits, measured),
            ),
            Operand(Product(value.factors), (batch, summed, (*heads, *wide))),
        ],
        (batch, tokens, (*heads, *wide)),
        {"num_heads": size_of(heads), "normalization": "softmax", "scale": scale},
    )


def _is_exp(atom: object) -> bool:
    return isinstance(atom, Exp)


Roles = tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]


def _roles(
    subject: Subject,
    query: Product,
    key: Product,
    value: Product,
    channels: set[Axis],
    summed: tuple[Axis, ...],
) -> Roles | None:
    """The axes of tokens, heads, batch and value channels."""
    axes = subject.axes
    tokens = tuple(a for a in axes if a in free(query) and a not in free(value))
    wide = tuple(a for a in axes if a in free(value) and a not in free(query))
    shared = tuple(a for a in axes if a not in tokens and a not in wide)
    fits = (
        free(query) == {*tokens, *shared, *channels}
        and free(key) == {*summed, *shared, *channels}
        and free(value) == {*summed, *shared, *wide}
        and tokens
        and wide
        and all(a.is_fixed for a in (*wide, *channels))
    )
    if not fits:
        return None
    if not same_size(tokens, summed):
        raise NearMissError("there are not as many keys as queries, as where heads share keys")
    if size_of(wide) != size_of(channels):
        raise NearMissError("heads of keys and of values differ in width")
    batch, heads = heads_of(subject, shared)
    return tokens, heads, batch, wide


def heads_of(
    subject: Subject, shared: tuple[Axis, ...]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Batch and heads, of the axes that query, key and value share."""
    if len(shared) == 1 and shared[0] in flat(subject.dims[0]):
        return shared, ()
    batch, heads = packed(subject, shared)
    return batch, heads
