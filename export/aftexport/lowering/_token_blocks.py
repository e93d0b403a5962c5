"""Split of a value's tokens into blocks, for sums in two levels.

The split is that of ``operators.two_level_sums`` in the portable bodies, for any axis.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from aftexport.lowering import nodes as match
from aftexport.operators.domain import MAX_BLOCK


class TokenBlocks:
    """A tape of new nodes, whose constants are added to a graph.

    Args:
        model: the graph, with float32 values.
        name: the prefix of the constants' names.
    """

    def __init__(self, model: ir.Model, name: str) -> None:
        self._model = model
        self._name = name
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self.tape = Tape()

    def ints(self, *values: int) -> ir.Value:
        """Return a constant int64 vector."""
        if values not in self._constants:
            name = f"{self._name}_ints_{len(self._constants)}"
            array = np.array(values, np.int64)
            self._constants[values] = match.add_constant(self._model, name, array)
        return self._constants[values]

    def scalar(self, value: int) -> ir.Value:
        """Return a constant int64 scalar."""
        return self.tape.op("Squeeze", [self.ints(value)])

    def split(self, x: ir.Value, axis: int, gap: float = 0.0) -> ir.Value:
        """Reshape ``[..., T, ...]`` to ``[..., blocks, size, ...]``, padded at the end.

        Args:
            x: the value, which has a known rank.
            axis: the axis of T.
            gap: the number that fills the padding.
        """
        op = self.tape.op
        one = self.ints(1)
        tokens = op("Shape", [x], {"start": axis, "end": axis + 1})
        tokens_up = op("Add", [tokens, self.ints(MAX_BLOCK - 1)])
        blocks = op("Max", [op("Div", [tokens_up, self.ints(MAX_BLOCK)]), one])
        blocks_up = op("Sub", [op("Add", [tokens, blocks]), one])
        size = op("Max", [op("Div", [blocks_up, blocks]), one])
        missing = op("Sub", [op("Mul", [blocks, size]), tokens])
        before = [op("Shape", [x], {"start": 0, "end": axis})] if axis else []
        assert x.shape is not None
        after = [op("Shape", [x], {"start": axis + 1})] if axis + 1 < len(x.shape) else []
        gap_shape = op("Concat", [*before, missing, *after], {"axis": 0})
        number = ir.tensor(np.array([gap], np.float32))
        filled = op("ConstantOfShape", [gap_shape], {"value": number})
        whole = op("Concat", [x, filled], {"axis": axis})
        shape = op("Concat", [*before, blocks, size, *after], {"axis": 0})
        return op("Reshape", [whole, shape])

    def total(self, blocks: ir.Value, axis: int, addition: str = "ReduceSum") -> ir.Value:
        """Sum the result of ``split`` over the blocks' tokens, then over the blocks.

        Args:
            blocks: the result of ``split``.
            axis: the axis of the blocks, which stays with size 1.
            addition: the reduction for the tokens and then for the blocks' sums.
        """
        op = self.tape.op
        of_blocks = op(addition, [blocks, self.ints(axis + 1)], {"keepdims": 0})
        return op(addition, [of_blocks, self.ints(axis)], {"keepdims": 1})

    def running_total(self, blocks: ir.Value, axis: int) -> ir.Value:
        """Return the running sum of a result of ``split``, in the same shape."""
        op = self.tape.op
        within = op("CumSum", [blocks, self.scalar(axis + 1)])
        totals = op("ReduceSum", [blocks, self.ints(axis + 1)], {"keepdims": 1})
        before = op("CumSum", [totals, self.scalar(axis)], {"exclusive": 1})
        return op("Add", [within, before])

    def join(self, blocks: ir.Value, axis: int, x: ir.Value) -> ir.Value:
        """Reshape ``blocks`` to the shape of ``x`` before ``split``, without the padding."""
        op = self.tape.op
        before = [op("Shape", [x], {"start": 0, "end": axis})] if axis else []
        assert x.shape is not None
        after = [op("Shape", [x], {"start": axis + 1})] if axis + 1 < len(x.shape) else []
        shape = op("Concat", [*before, self.ints(-1), *after], {"axis": 0})
        tokens = op("Shape", [x], {"start": axis, "end": axis + 1})
        joined = op("Reshape", [blocks, shape])
        return op("Slice", [joined, self.ints(0), tokens, self.ints(axis)])
