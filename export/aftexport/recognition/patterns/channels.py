"""The axes of channels, tokens, batch and heads.

Channels are the axes that the layer below a tensor makes. The roles of the other axes follow in
mechanisms that contract keys and values first:

sum_du query[b,t,h,g,d] key[b,u,h,d] value[b,u,h,e]
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from aftexport.recognition.algebra import free
from aftexport.recognition.patterns.pattern import NearMissFound, Subject, same_size, size_of
from aftexport.recognition.read.reader import Reader
from aftexport.recognition.terms import (
    Axis,
    Dims,
    Exp,
    Leaf,
    Max,
    Product,
    Sum,
    Unreadable,
    flat,
    flat_dims,
    fresh,
    regroup,
    single_atom,
)

_CHANNELS_SECOND = ("BatchNormalization", "Conv", "ConvTranspose", "GroupNormalization",
           "InstanceNormalization")  # fmt: skip
_CHANNELS_LAST = ("Einsum", "Gemm", "LayerNormalization", "MatMul")
_RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_PARTS = ("Concat", "Gather", "Pad", "Slice", "Split")
_MAX_NODES_BELOW = 24
"""The most nodes between a tensor and the layer that makes its channels."""


def channel_axes(product: Product, reader: Reader) -> set[Axis]:
    """Return the axes of a formula that are known to be channels, since a layer makes them."""
    channels: set[Axis] = set()
    for atom, _ in product.factors:
        if isinstance(atom, Leaf):
            channels |= _of_leaf(atom, reader)
        elif not isinstance(atom, Sum | Max):
            channels.update(*(channel_axes(child, reader) for child in atom.children))
    return channels


def are_beside_channels(axes: Collection[Axis], leaf: Leaf, reader: Reader) -> bool:
    """Return whether axes of a leaf are dims of the layer below that are not its channels.

    They are so too if the leaf is one channel, and has no axis of channels.
    """
    copies, dims = _copied(leaf)
    made = _made_below(leaf.value, dims, reader)
    below = {axis for dim in (made[1] if made else ()) for axis in flat(dim)} - _channels(made)
    return all({*flat((copies[axis],))} <= below for axis in axes if axis in copies)


def _of_leaf(leaf: Leaf, reader: Reader) -> set[Axis]:
    copies, dims = _copied(leaf)
    made = _channels(_made_below(leaf.value, dims, reader))
    return {axis for axis, copy in copies.items() if made & {*flat((copy,))}}


def _copied(leaf: Leaf) -> tuple[dict[Axis, Axis], Dims]:
    """Return copies of the axes of a leaf, which reshapes may split, and its dims of them."""
    copies = {axis: Axis(axis.sizes) for axis in dict.fromkeys(sum(flat_dims(leaf.dims), ()))}
    return copies, tuple(tuple(copies[axis] for axis in axes) for axes in flat_dims(leaf.dims))


_Made = tuple[set[Axis], Dims]
"""The channels that a layer makes, and all dims of its output."""


def _channels(made: _Made | None) -> set[Axis]:
    return made[0] if made else set()


def _made_below(value: ir.Value, dims: Dims, reader: Reader) -> _Made | None:
    """Return the channels and the dims of the layer below ``value``, which has ``dims``."""
    parts: list[tuple[Dims, Dims]] = []
    for _ in range(_MAX_NODES_BELOW):
        node = value.producer()
        if node is None or len(dims) < 2:
            return None
        if node.op_type in (*_CHANNELS_SECOND, *_CHANNELS_LAST):
            channels = set(flat(dims[1 if node.op_type in _CHANNELS_SECOND else -1]))
            # Parts of channels are channels.
            for whole, part in reversed(parts):
                for axes, own in zip(whole, part, strict=True):
                    channels |= {*flat(own)} if channels & {*flat(axes)} else set()
            return channels, dims
        made = [v for v in node.inputs if v is not None and v.producer() is not None]
        if not made:
            return None
        try:
            # Beside a table of positions, a tensor of the same shape is the one that layers make.
            shape = reader.shape(value)
            below = next((v for v in made if reader.shape(v) == shape), made[0])
            value, whole = below, _dims_below(node, below, dims, reader)
        except Unreadable:
            return None
        if node.op_type in _PARTS and len(whole) == len(dims):
            parts.append((whole, dims))
        dims = whole
    return None


def _dims_below(node: ir.Node, below: ir.Value, dims: Dims, reader: Reader) -> Dims:
    """Return the dims of the input of a node whose output has ``dims``; raises Unreadable."""
    shape = reader.shape(below)
    if node.op_type == "Transpose":
        order = node.attributes.get_ints("perm", list(reversed(range(len(dims)))))
        return tuple(dims[order.index(i)] for i in range(len(dims)))
    if node.op_type in _RESHAPES:
        return regroup([axis for axes in dims for axis in axes], shape)
    if node.op_type == "Gather" and len(shape) == len(dims) + 1:
        place = node.attributes.get_int("axis", 0) % len(shape)
        return (*dims[:place], fresh(shape[place]), *dims[place:])
    own = reader.shape(node.outputs[0])
    if len(shape) != len(dims) or (node.op_type not in _PARTS and own != shape):
        raise Unreadable(f"{node.op_type} may change the order of dims")
    kept = zip(dims, own, shape, strict=True)
    return tuple(axes if size == whole else fresh(whole) for axes, size, whole in kept)


def check_tokens(
    subject: Subject,
    tokens: Sequence[Axis],  # the axes of the queries' positions
    summed: Sequence[Axis],  # the axes of the keys' positions
    keys: Product,
    contracted: Collection[Axis] = (),  # the channels in which query and key meet
) -> None:
    """Raise NearMissFound unless the summed axes can only be those of the tokens."""
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


@dataclass(frozen=True)
class Roles:
    """The axes of a value by their role."""

    tokens: tuple[Axis, ...]  # the queries' positions
    batch: tuple[Axis, ...]
    heads: tuple[Axis, ...]  # the heads of keys and values
    groups: tuple[Axis, ...]  # the heads of queries that read the same head of keys and values
    wide: tuple[Axis, ...]  # the channels of the values
    are_other_tokens: bool  # whether keys may be more or fewer than queries

    @property
    def query_heads(self) -> tuple[Axis, ...]:
        """The heads of the queries, in the order of the operators."""
        return (*self.heads, *self.groups)

    def attributes(self, channels: int, more: int = 0) -> dict[str, int]:
        """Return the attributes of an operator whose heads have so many channels of a key.

        Its values may be of another width only if it has the number of their heads.

        ``more`` counts channels that the values have beside those of ``wide``.
        """
        is_wide = bool(self.groups) or size_of(self.wide) + more != channels
        of_keys = {"kv_num_heads": size_of(self.heads)} if is_wide else {}
        return {"num_heads": size_of(self.query_heads), **of_keys}


def roles_of(
    subject: Subject,
    query: Product,
    key: Product,
    value: Product,
    channels: Collection[Axis],  # the axes in which query and key meet
    summed: tuple[Axis, ...],  # the axes of the keys' positions
) -> Roles | None:
    """Return the roles of the axes, None if they do not fit."""
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
