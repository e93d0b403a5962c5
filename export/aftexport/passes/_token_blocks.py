"""Cuts the tokens of a value of a graph into blocks, for sums in two levels.

The same cut as ``mechanisms._two_level_sums`` has in the bodies, for any axis.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from aftexport.operators.numerics import MAX_BLOCK
from aftexport.passes import nodes as match


class TokenBlocks:
    """Adds nodes to a tape, and the constants that they read to a graph.

    Args:
        model: the graph, of float32 values.
        name: the beginning of the constants' names.
    """

    def __init__(self, model: ir.Model, name: str) -> None:
        self._model = model
        self._name = name
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self.tape = Tape()

    def ints(self, *values: int) -> ir.Value:
        """A constant int64 vector."""
        if values not in self._constants:
            name = f"{self._name}_ints_{len(self._constants)}"
            array = np.array(values, np.int64)
            self._constants[values] = match.add_constant(self._model, name, array)
        return self._constants[values]

    def scalar(self, value: int) -> ir.Value:
        """A constant int64 scalar."""
        return self.tape.op("Squeeze", [self.ints(value)])

    def split(self, x: ir.Value, axis: int, gap: float = 0.0) -> ir.Value:
        """Reshapes ``[..., T, ...]`` to ``[..., blocks, size, ...]``, with a gap after the last.

        Args:
            x: the value; its rank is known.
            axis: the axis of T.
            gap: the number that fills the gap.
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
            blocks: the tokens in blocks.
            axis: the axis of the blocks, which stays as 1.
            addition: the reduction that adds tokens and then the blocks' sums.
        """
        op = self.tape.op
        of_blocks = op(addition, [blocks, self.ints(axis + 1)], {"keepdims": 0})
        return op(addition, [of_blocks, self.ints(axis)], {"keepdims": 1})

    def running_total(self, blocks: ir.Value, axis: int) -> ir.Value:
        """The running sum of what ``split`` gave, in its shape."""
        op = self.tape.op
        within = op("CumSum", [blocks, self.scalar(axis + 1)])
        totals = op("ReduceSum", [blocks, self.ints(axis + 1)], {"keepdims": 1})
        before = op("CumSum", [totals, self.scalar(axis)], {"exclusive": 1})
        return op("Add", [within, before])

    def join(self, blocks: ir.Value, axis: int, x: ir.Value) -> ir.Value:
        """Reshapes ``blocks`` to the shape of ``x``, which was split, without the gap."""
        op = self.tape.op
        before = [op("Shape", [x], {"start": 0, "end": axis})] if axis else []
        assert x.shape is not None
        after = [op("Shape", [x], {"start": axis + 1})] if axis + 1 < len(x.shape) else []
        shape = op("Concat", [*before, self.ints(-1), *after], {"axis": 0})
        tokens = op("Shape", [x], {"start": axis, "end": axis + 1})
        joined = op("Reshape", [blocks, shape])
        return op("Slice", [joined, self.ints(0), tokens, self.ints(axis)])
