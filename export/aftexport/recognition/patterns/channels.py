"""The channels of a tensor: the axes that the layer below it makes."""

from collections.abc import Collection

import onnx_ir as ir

from aftexport.recognition.formula.axes import (
    Axis,
    Dims,
    flat,
    flat_dims,
    fresh,
    regroup,
)
from aftexport.recognition.formula.terms import Leaf, Max, Product, Sum
from aftexport.recognition.formula.unreadable import Unreadable
from aftexport.recognition.read.reader import Reader

_CHANNELS_SECOND = ("BatchNormalization", "Conv", "ConvTranspose", "GroupNormalization",
           "InstanceNormalization")  # fmt: skip
_CHANNELS_LAST = ("Einsum", "Gemm", "LayerNormalization", "MatMul")
_RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_PARTS = ("Concat", "Gather", "Pad", "Slice", "Split")
_MAX_NODES_BELOW = 24
"""The most nodes between a tensor and the layer that makes its channels."""


def channel_axes(product: Product, reader: Reader) -> set[Axis]:
    """Return the axes of a formula that are known to be channels, since a layer makes them.

    Args:
        product: the formula.
        reader: the reader of the formula.
    """
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
