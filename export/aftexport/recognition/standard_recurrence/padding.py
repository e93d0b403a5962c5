"""Masks of the tokens within the lengths, and tensors that are 0 at the other tokens."""

import numpy as np
import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes


class Padding:
    """The masks of a graph.

    Args:
        new: the place of the nodes.
        known: the masks by tokens and lengths, shared by the nodes of a graph.
    """

    def __init__(self, new: NewNodes, known: dict[tuple[ir.Value, ir.Value], ir.Value]) -> None:
        self._new = new
        self._known = known

    def valid(self, tokens: ir.Value, lengths: ir.Value) -> ir.Value:
        """Return the mask of the tokens of ``[B, T, ...]`` within the lengths, ``[B, T, 1]``."""
        if (tokens, lengths) not in self._known:
            new = self._new
            count = new.add("Squeeze", new.add("Shape", tokens, start=1, end=2))
            zero, one = (new.constant(np.array(number)) for number in (0, 1))
            positions = new.add("Range", zero, count, one)
            column = new.add("Unsqueeze", lengths, new.constant([1]))
            rows = new.add("Less", positions, column)
            self._known[tokens, lengths] = new.add("Unsqueeze", rows, new.constant([2]))
        return self._known[tokens, lengths]

    def cleared(self, tensor: ir.Value, valid: ir.Value) -> ir.Value:
        """Return a tensor ``[B, T, ...]`` with 0 at the tokens of padding."""
        new = self._new
        zero = new.add("CastLike", new.constant(np.array(0)), tensor)
        return new.add("Where", valid, tensor, zero)
