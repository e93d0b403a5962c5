"""Causal attention in blocks of queries, whose memory grows with the tokens, not their square.

A scan over the blocks computes scores ``[..., block, S]`` instead of ``[..., L, S]``.
"""

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset18 as op

from aftexport.lowering.constant_numbers import constant, ints
from aftexport.lowering.graph_body import GraphBody
from aftexport.system.internals.torch_translation import call_op

BLOCK = 128
"""The maximum number of queries of a block: a product with it is as fast as a longer one."""


def causal_attention_in_blocks(
    query: Any, key: Any, value: Any, *, rank: int, element: ir.DataType
) -> Any:
    """Translate causal attention of scaled ``query [..., L, E]`` and ``key [..., E, S]``.

    Args:
        query, key: the scaled operands; the key is transposed.
        value: ``[..., S, F]``.
        rank: the number of axes of the operands.
        element: their type.
    """
    tokens = op.Shape(query, start=-2, end=-1)
    size = op.Max(op.Min(tokens, ints(BLOCK)), ints(1))
    blocks = op.Div(op.Sub(op.Add(tokens, size), ints(1)), size)
    lead, width = op.Shape(query, end=-2), op.Shape(query, start=-1)
    gap = op.Concat(lead, op.Sub(op.Mul(blocks, size), tokens), width, axis=0)
    whole = op.Concat(query, op.Expand(op.CastLike(0.0, query), gap), axis=-2)
    split = op.Reshape(whole, op.Concat(lead, blocks, size, width, axis=0), allowzero=1)
    zero, one = constant(0), constant(1)
    starts = op.Mul(op.Range(zero, op.Squeeze(blocks, ints(0)), one), size)
    # Keys and values are states of the scan: its body then refers to no value outside.
    *_, attended = call_op(
        "Scan",
        key,
        value,
        split,
        starts,
        num_scan_inputs=2,
        scan_input_axes=[rank - 2, 0],
        scan_output_axes=[rank - 2],
        body=_body(element),
        _num_outputs=3,
    )
    # The keys may have more documents or heads than the queries.
    lead = op.Shape(attended, end=-3)
    shape = op.Concat(lead, op.Mul(blocks, size), op.Shape(value, start=-1), axis=0)
    return op.Slice(op.Reshape(attended, shape, allowzero=1), ints(0), tokens, ints(-2))


def _body(element: ir.DataType) -> ir.Graph:
    """Return the attention of one block of queries ``[..., block, E]`` from a position on."""
    kind = ir.TensorType(element)
    key, value, block = (ir.val(name, type=kind) for name in ("key", "value", "block"))
    start = ir.val("start", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(()))
    body = GraphBody()
    zero, one = (body.Constant(value=ir.tensor(np.array(n))) for n in (0, 1))
    axis0 = body.Constant(value=ir.tensor(np.array([0])))
    axis1 = body.Constant(value=ir.tensor(np.array([1])))
    masked = body.Constant(value=ir.tensor(-math.inf, dtype=element))
    size = body.Squeeze(body.Shape(block, start=-2, end=-1), axis0)
    rows = body.Unsqueeze(body.Add(body.Range(zero, size, one), start), axis1)
    columns = body.Range(zero, body.Squeeze(body.Shape(key, start=-1), axis0), one)
    is_seen = body.LessOrEqual(columns, rows)
    scores = body.Where(is_seen, body.MatMul(block, key), masked)
    attended = body.MatMul(body.Softmax(scores, axis=-1), value)
    outputs = [body.Identity(key), body.Identity(value), attended]
    for output in outputs:
        output.type = kind
    inputs = [key, value, block, start]
    return ir.Graph(
        inputs, outputs, nodes=body.nodes, name="attention_of_a_block", opset_imports={"": 18}
    )
