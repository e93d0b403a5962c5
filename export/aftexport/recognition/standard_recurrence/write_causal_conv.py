"""A CausalDepthwiseConv as the CausalConvWithState of ONNX, which has no lengths.

A causal convolution reads no later token, so padding only changes its own rows, which become 0. The
state is that after the last token within the lengths, and is gathered from the inputs.
"""

import numpy as np
import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes
from aftexport.recognition.standard_recurrence.full_lengths import are_full
from aftexport.recognition.standard_recurrence.node_values import CAUSAL_CONV
from aftexport.recognition.standard_recurrence.padding import Padding


def write_causal_conv(node: ir.Node, padding: Padding, new: NewNodes) -> list[ir.Value]:
    """Add the nodes that compute the outputs of a node, and return both outputs.

    Args:
        node: the node.
        padding: the masks of the graph's tokens.
        new: the place of the nodes.
    """
    x, weight, bias, past, lengths = node.inputs
    assert x is not None  # a required input
    assert weight is not None  # a required input
    assert lengths is not None  # a required input
    before = None if past is None else _turned(past, new)
    inputs = [_turned(x, new), _filter(weight, new), bias, before]
    while inputs[-1] is None:
        inputs.pop()
    attributes = [a for name, a in node.attributes.items() if name == "activation"]
    standard = ir.Node("", CAUSAL_CONV, inputs, attributes, num_outputs=2)
    output, present = (_turned(value, new) for value in new.append(standard))
    if are_full(lengths, x):
        return [output, present]
    output = padding.cleared(output, padding.valid(x, lengths))
    state = node.outputs[1]
    if state.uses() or state.is_graph_output():
        present = _state(x, weight, past, lengths, new)
    return [output, present]


def _turned(value: ir.Value, new: NewNodes) -> ir.Value:
    return new.add("Transpose", value, perm=[0, 2, 1])


def _filter(weight: ir.Value, new: NewNodes) -> ir.Value:
    """Return a filter ``[C, K]`` as ``[C, 1, K]``."""
    if weight.const_value is not None and not weight.is_graph_input():
        return new.constant(weight.const_value.numpy()[:, None])
    return new.add("Unsqueeze", weight, new.constant([1]))


def _state(
    x: ir.Value, weight: ir.Value, past: ir.Value | None, lengths: ir.Value, new: NewNodes
) -> ir.Value:
    """Return the K - 1 inputs up to the last token within the lengths, ``[B, K - 1, C]``."""
    one = new.constant([1])
    count = new.add("Sub", new.add("Shape", weight, start=1, end=2), one)
    batch = new.add("Shape", x, start=0, end=1)
    shape = new.add("Concat", batch, count, new.add("Shape", x, start=2, end=3), axis=0)
    if past is None:
        zero = new.add("CastLike", new.constant([0]), x)
        past = new.add("Expand", zero, shape)
    inputs = new.add("Concat", past, x, axis=1)
    # The inputs begin with K - 1 tokens of the past, so the state begins at the length itself.
    start, step = (new.constant(np.array(number)) for number in (0, 1))
    numbers = new.add("Range", start, new.add("Squeeze", count), step)
    inside = new.add("Max", new.add("Min", lengths, new.add("Shape", x, start=1, end=2)), start)
    places = new.add("Add", new.add("Unsqueeze", inside, one), numbers)
    column = new.add("Unsqueeze", places, new.constant([2]))
    return new.add("GatherElements", inputs, new.add("Expand", column, shape), axis=1)
