"""The roles of the axes of query, key and value in mechanisms that contract keys and values first:

sum_du query[b,t,h,g,d] key[b,u,h,d] value[b,u,h,e]
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from aftexport.recognition.formula.algebra import free
from aftexport.recognition.formula.axes import Axis, flat
from aftexport.recognition.formula.terms import Product
from aftexport.recognition.patterns._token_axes import packed
from aftexport.recognition.patterns.channels import channel_axes
from aftexport.recognition.patterns.pattern import Subject, same_size, size_of


@dataclass(frozen=True)
class Roles:
    """The axes of a value by their role.

    Attributes:
        tokens: the queries' positions.
        batch: the documents.
        heads: the heads of keys and values.
        groups: the heads of queries that read the same head of keys and values.
        wide: the channels of the values.
        are_other_tokens: whether keys may be more or fewer than queries.
    """

    tokens: tuple[Axis, ...]
    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    wide: tuple[Axis, ...]
    are_other_tokens: bool

    @property
    def query_heads(self) -> tuple[Axis, ...]:
        """The heads of the queries, in the order of the operators."""
        return (*self.heads, *self.groups)

    def attributes(self, channels: int, more: int = 0) -> dict[str, int]:
        """Return the attributes of an operator whose heads have so many channels of a key.

        Its values may be of another width only if it has the number of their heads.

        Args:
            channels: the number of channels.
            more: the number of channels that the values have beside those of ``wide``.
        """
        is_wide = bool(self.groups) or size_of(self.wide) + more != channels
        of_keys = {"kv_num_heads": size_of(self.heads)} if is_wide else {}
        return {"num_heads": size_of(self.query_heads), **of_keys}


def roles_of(
    subject: Subject,
    query: Product,
    key: Product,
    value: Product,
    channels: Collection[Axis],
    summed: tuple[Axis, ...],
) -> Roles | None:
    """Return the roles of the axes, None if they do not fit.

    Args:
        subject: the value.
        query: the factors of the query.
        key: the factors of the key.
        value: the factors of the value.
        channels: the axes in which query and key meet.
        summed: the axes of the keys' positions.
    """
    axes = subject.axes
    asking = tuple(a for a in axes if a in free(query) and a not in free(value))
    wide = tuple(a for a in axes if a in free(value) and a not in free(query))
    shared = tuple(a for a in axes if a not in asking and a not in wide)
    fits = (
        free(query) == {*asking, *shared, *channels}
        and free(key) == {*summed, *shared, *channels}
        and free(value) == {*summed, *shared, *wide}
        and asking
        and wide
        and all(a.is_fixed for a in (*wide, *channels))
    )
    if not fits:
        return None
    groups = _groups(subject, query, asking, summed)
    tokens = tuple(axis for axis in asking if axis not in groups)
    batch, heads = heads_of(subject, shared)
    return Roles(tokens, batch, heads, groups, wide, not same_size(tokens, summed))


def _groups(
    subject: Subject, query: Product, asking: tuple[Axis, ...], summed: tuple[Axis, ...]
) -> tuple[Axis, ...]:
    """Return the heads among the axes that only the query has; the others are its positions."""
    for groups in _fixed_parts(asking):
        if same_size([axis for axis in asking if axis not in groups], summed):
            return groups
    channels = channel_axes(query, subject.reader)
    groups = tuple(axis for axis in asking if axis.is_fixed and axis in channels)
    return groups if len(groups) < len(asking) else ()


def _fixed_parts(axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    """Yield the parts of axes that are fixed and not all, the smallest first."""
    fixed = [axis for axis in axes if axis.is_fixed]
    for count in range(len(axes)):
        yield from itertools.combinations(fixed, count)


def heads_of(
    subject: Subject, shared: tuple[Axis, ...]
) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return batch and heads of the axes that query, key and value share."""
    if len(shared) == 1 and shared[0] in flat(subject.dims[0]):
        return shared, ()
    batch, heads = packed(subject, shared)
    return batch, heads
