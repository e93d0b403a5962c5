"""The nodes of a graph inside a node, such as the body of a scan."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir


class GraphBody:
    """A list of nodes that is filled by the same calls as an onnxscript opset."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def __getattr__(self, op_type: str) -> Callable[..., ir.Value]:
        def apply(*inputs: ir.Value, **attributes: Any) -> ir.Value:
            self.nodes.append(ir.node(op_type, inputs, attributes))
            return self.nodes[-1].outputs[0]

        return apply
