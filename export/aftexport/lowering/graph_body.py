"""Constants of the translations for torch.onnx, and graphs inside a node, as the body of a scan."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op


class GraphBody:
    """A list of nodes that is filled by the same calls as an onnxscript opset."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        def apply(*inputs: ir.Value, **attributes: Any) -> ir.Value:
            self.nodes.append(ir.node(op_type, inputs, attributes))
            return self.nodes[-1].outputs[0]

        return apply


def constant(numbers: int | Sequence[int]) -> Any:
    """Return a number, or a tensor of one axis."""
    return op.Constant(value=ir.tensor(np.array(numbers, np.int64)))


def ints(*values: int) -> Any:
    """Return a tensor of one axis."""
    return constant(values)
