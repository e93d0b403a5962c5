"""Which axes are the tokens, which the channels, which the batch."""

from collections.abc import Sequence

import onnx_ir as ir

from aftexport.fuse.atoms import Exp, Function, Leaf, Plus, Product, sole
from aftexport.fuse.axes import Axis, flat, flat_dims
from aftexport.fuse.pattern import NearMissError, Subject, size_of

_THROUGH = ("Slice", "Split", "Concat", "Add", "Mul", "Reshape", "Cast", "Gather")
"""Operators that leave the channels in the dim they were in."""


def channel_axes(product: Product) -> set[Axis]:
    """The axes that are known to be channels: what linear layers and convolutions give."""
    found: set[Axis] = set()
    for atom, _ in product.factors:
        if isinstance(atom, Leaf):
            dim = _channel_dim(atom.value, len(atom.dims))
            if dim is not None and atom.dims:
                found |= set(flat(atom.dims[dim]))
        elif isinstance(atom, Exp):
            found |= channel_axes(atom.argument)
        elif isinstance(atom, Plus):
            found.update(*(channel_axes(term) for term in atom.terms))
        elif isinstance(atom, Function):
            found.update(*(channel_axes(argument) for argument in atom.arguments))
    return found


def _channel_dim(value: ir.Value, rank: int) -> int | None:
    node = value.producer()
    for _ in range(8):
        if node is None:
            return None
        if node.op_type in ("Conv", "BatchNormalization", "InstanceNormalization"):
            return 1
        if node.op_type in ("MatMul", "Gemm", "LayerNormalization", "Einsum"):
            return rank - 1
        if node.op_type not in _THROUGH:
            return None
        node = next((p for v in node.inputs if v is not None and (p := v.producer())), None)
    return None


def check_tokens(
    subject: Subject, tokens: Sequence[Axis], summed: Sequence[Axis], keys: Product
) -> None:
    """Raises NearMissError unless the summed axes can only be those of the tokens.

    Args:
        subject: the value.
        tokens: the axes of the query's positions.
        summed: the axes of the key's.
        keys: what depends on them.
    """
    dims = flat_dims(subject.dims)
    if set(dims[0]) & set(tokens):
        raise NearMissError("the mean is over the first axis, which may be the batch")
    channels = channel_axes(keys)
    if channels & set(summed):
        raise NearMissError("the mean is over the channels")
    if not all(axis.is_fixed for axis in summed):
        return
    if any(not axis.is_fixed for axes in dims[1:] for axis in axes):
        raise NearMissError(f"the mean is over an axis of always {size_of(summed)}, no tokens")
    for atom, _ in keys.factors:
        inner = sole(atom.argument) if isinstance(atom, Exp) else atom
        if isinstance(inner, Leaf) and not channels and set(flat(inner.dims[-1])) & set(summed):
            raise NearMissError("the mean is over the last axis, which may be the channels")


def packed(subject: Subject, others: Sequence[Axis]) -> tuple[tuple[Axis, ...], tuple[Axis, ...]]:
    """Which of the axes that are no tokens are the batch, and which the channels."""
    first = flat_dims(subject.dims)[0]
    moving = tuple(axis for axis in others if not axis.is_fixed)
    if not moving and len(others) > 1 and first:
        moving = tuple(axis for axis in others[:1])
    return moving, tuple(axis for axis in others if axis not in moving)
