"""The translation of ``logcumsumexp``: a scan that adds logarithms.

As log(cumsum(exp(x))) it overflows from 89 on, and less a maximum of the whole it loses what comes
before the maximum.
"""

import math
from typing import Any

import onnx_ir as ir
from onnxscript import opset18 as op
from torch.onnx._internal.exporter._torchlib.ops.hop import call_op


def logcumsumexp(self, dim: int):  # type: ignore[no-untyped-def]
    """For torch.onnx: a Scan over ``dim``, in float32 or wider."""
    if not len(self.shape):
        return op.Identity(self)
    dim %= len(self.shape)
    wide = self if self.dtype == ir.DataType.DOUBLE else op.Cast(self, to=ir.DataType.FLOAT)
    element = ir.DataType.DOUBLE if self.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    shape = op.Shape(op.ReduceMax(wide, [dim], keepdims=0))
    start = op.Expand(op.CastLike(-math.inf, wide), shape)
    # onnxscript's own Scan has one output.
    _, sums = call_op(
        "Scan",
        start,
        wide,
        num_scan_inputs=1,
        scan_input_axes=[dim],
        scan_output_axes=[dim],
        body=_body(element),
        _num_outputs=2,
    )
    return op.CastLike(sums, self)


def _body(element: ir.DataType) -> ir.Graph:
    kind = ir.TensorType(element)
    before, x = ir.val("sum_before", type=kind), ir.val("term", type=kind)
    nodes = list[ir.Node]()

    def apply(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        nodes.append(node)
        return node.outputs[0]

    zero = apply("Constant", value=ir.tensor(0.0, dtype=element))
    apart = apply("Abs", apply("Sub", before, x))
    # Equal infinities have no difference.
    apart = apply("Where", apply("Equal", before, x), zero, apart)
    more = apply("Softplus", apply("Neg", apart))
    after = apply("Add", apply("Max", before, x), more)
    outputs = (apply("Identity", after), apply("Identity", after))
    for output in outputs:
        output.type = kind
    return ir.Graph((before, x), outputs, nodes=nodes, name="logcumsumexp", opset_imports={"": 18})
