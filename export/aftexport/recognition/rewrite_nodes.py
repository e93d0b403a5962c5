"""The nodes of a rewrite: its operands, the operator and the factors outside."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.lowering import nodes as matching
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.recognition.formula.axes import Dims, flat
from aftexport.recognition.patterns.pattern import Operand, Rewrite, size_of
from aftexport.recognition.writer import Writer


def write_nodes(writer: Writer, rewrite: Rewrite, dims: Dims) -> ir.Value:
    """Write a rewrite and return its output.

    Args:
        writer: the writer of the new nodes.
        rewrite: the operator, its operands and the factors outside.
        dims: the axes of the replaced value.

    Raises:
        Unreadable: if the layout cannot be written.
    """
    written = {id(operand): operand for operand in rewrite.operands}
    values = {name: _operand(writer, rewrite, operand) for name, operand in written.items()}
    inputs = [values[id(operand)] for operand in rewrite.operands]
    heads, width = 1, 1
    if rewrite.division is not None:
        heads = int(rewrite.attributes["num_heads"])
        width = size_of(flat(rewrite.groups[2])) // heads
        kv_heads = int(rewrite.attributes.get("kv_num_heads", heads))
        inputs[2] = writer.with_ones(inputs[2], kv_heads, width)
    lengths = [_lengths(writer, inputs[place]) for place in range(1 + rewrite.has_key_lengths)]
    inputs += lengths
    own = {a.name: a.default for a in ALL_OPERATORS[rewrite.op_type].kernel_attributes}
    node = matching.custom_node(rewrite.op_type, inputs, {**own, **rewrite.attributes})
    writer.nodes.append(node)
    node.outputs[0].name = f"{writer.prefix}_{rewrite.op_type}"
    output = node.outputs[0]
    if rewrite.division is not None:
        output = writer.divided(output, rewrite.division, heads, width)
    if rewrite.extra_head:
        output = writer.without_head(output, size_of(flat(rewrite.groups[2])))
    if rewrite.outside.factors or not np.isclose(rewrite.outside.coefficient, 1.0, rtol=1e-12):
        return writer.multiplied(output, rewrite.groups, rewrite.outside, dims)
    return writer.laid_out(output, rewrite.groups, dims)


def _lengths(writer: Writer, value: ir.Value) -> ir.Value:
    """Return the lengths of documents without padding, from a tensor ``[B, T, D]``."""
    batch = writer.node("Shape", value, start=0, end=1)
    tokens = writer.node("Shape", value, start=1, end=2)
    return writer.node("Expand", tokens, batch)


def _operand(writer: Writer, rewrite: Rewrite, operand: Operand | NDArray[np.float64]) -> ir.Value:
    if not isinstance(operand, Operand):
        return writer.constant(operand)
    if operand.weights.factors:
        return writer.plus_log(
            operand.formula, operand.weights, operand.groups, is_spread=operand.is_spread
        )
    if operand.joined:
        return writer.joined([(operand.formula, operand.groups), *operand.joined])
    if rewrite.extra_head:
        channels, heads = size_of(flat(operand.groups[2])), int(rewrite.attributes["num_heads"]) - 1
        return writer.with_head(operand.formula, operand.groups, channels // heads, operand.beside)
    value = writer.tensor(operand.formula, operand.groups, is_spread=operand.is_spread)
    return writer.floored(value) if operand.floored else value
