"""The axes of tokens, channels and batch."""

from collections.abc import Collection, Sequence

from aftexport.recognition.formula.axes import Axis, flat, flat_dims
from aftexport.recognition.formula.terms import Exp, Leaf, Product, single_atom
from aftexport.recognition.patterns.channels import are_beside_channels, channel_axes
from aftexport.recognition.patterns.pattern import NearMissFound, Subject, size_of


def check_tokens(
    subject: Subject,
    tokens: Sequence[Axis],
    summed: Sequence[Axis],
    keys: Product,
    contracted: Collection[Axis] = (),
) -> None:
    """Raise NearMissFound unless the summed axes can only be those of the tokens.

    Args:
        subject: the value.
        tokens: the axes of the queries' positions.
        summed: the axes of the keys' positions.
        keys: the factors that depend on the keys' positions.
        contracted: the channels in which query and key meet.
    """
    dims = flat_dims(subject.dims)
    if set(dims[0]) & set(tokens):
        raise NearMissFound("the mean is over the first axis, which may be the batch")
    reader = subject.reader
    channels = channel_axes(keys, reader)
    if channels & set(summed):
        raise NearMissFound("the mean is over the channels")
    channels |= set(contracted)
    if not all(axis.is_fixed for axis in summed):
        return
    if any(not axis.is_fixed for axes in dims[1:] for axis in axes):
        raise NearMissFound(
            f"the mean is over an axis that always has size {size_of(summed)}, and not over tokens"
        )
    for atom, _ in keys.factors:
        inner = single_atom(atom.argument) if isinstance(atom, Exp) else atom
        if not isinstance(inner, Leaf) or channels or are_beside_channels(summed, inner, reader):
            continue
        if set(flat(inner.dims[-1])) & set(summed):
            raise NearMissFound("the mean is over the last axis, which may be the channels")


def packed(subject: Subject, others: Sequence[Axis]) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Return batch and channels of the axes other than tokens."""
    first = flat_dims(subject.dims)[0]
    moving = tuple(axis for axis in others if not axis.is_fixed)
    if not moving and len(others) > 1 and first:
        moving = tuple(axis for axis in others[:1])
    return moving, tuple(axis for axis in others if axis not in moving)
