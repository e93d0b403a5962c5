"""The roles of the axes of query, key and value in mechanisms that contract keys and values first:

sum_du query[b,t,h,d] key[b,u,h,d] value[b,u,h,e]
"""

from collections.abc import Collection

from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import Product
from aftexport.recognition.patterns._token_axes import packed
from aftexport.recognition.patterns.pattern import NearMissFound, Subject, same_size, size_of

Roles = tuple[tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...], tuple[Axis, ...]]


def roles_of(
    subject: Subject,
    query: Product,
    key: Product,
    value: Product,
    channels: Collection[Axis],
    summed: tuple[Axis, ...],
) -> Roles | None:
    """Return the axes of tokens, heads, batch and value channels, None if they do not fit.

    Args:
        subject: the value.
        query: the factors of the query.
        key: the factors of the key.
        value: the factors of the value.
        channels: the axes in which query and key meet.
        summed: the axes of the keys' positions.
    """
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
        raise NearMissFound("there are not as many keys as queries, as where heads share keys")
    if size_of(wide) != size_of(channels):
        raise NearMissFound("heads of keys and of values differ in width")
    batch, heads = heads_of(subject, shared)
    return tokens, heads, batch, wide


def heads_of(
    subject: Subject, shared: tuple[Axis, ...]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return batch and heads of the axes that query, key and value share."""
    if len(shared) == 1 and shared[0] in flat(subject.dims[0]):
        return shared, ()
    batch, heads = packed(subject, shared)
    return batch, heads
