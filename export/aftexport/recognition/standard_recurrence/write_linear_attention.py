"""A RecurrentLinearAttention as the LinearAttention of ONNX, which has no lengths.

A token of padding with key 0, value 0, decay 0 (a factor of 1) and beta 0 changes no state. The
rows of padding in the output become 0 after the node.
"""

import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes
from aftexport.recognition.standard_recurrence.full_lengths import are_full
from aftexport.recognition.standard_recurrence.node_values import LINEAR_ATTENTION
from aftexport.recognition.standard_recurrence.padding import Padding

_KEPT = ("update_rule", "q_num_heads", "kv_num_heads", "scale")


def why_not_standard(node: ir.Node) -> str:
    """Return the reason why the standard operator cannot express a node; empty if it can."""
    direction = node.attributes.get_string("direction", "forward")
    if direction != "forward":
        return f"direction {direction}"
    normalizer = node.attributes.get_string("normalizer", "none")
    return "" if normalizer == "none" else f"normalizer {normalizer}"


def write_linear_attention(node: ir.Node, padding: Padding, new: NewNodes) -> list[ir.Value]:
    """Add the nodes that compute the outputs of a node, and return both outputs.

    Args:
        node: the node, for which ``why_not_standard`` has no reason.
        padding: the masks of the graph's tokens.
        new: the place of the nodes.
    """
    query, key, value, past, decay, beta, lengths = node.inputs
    assert query is not None  # a required input
    assert lengths is not None  # a required input
    is_full = are_full(lengths, query)
    if not is_full:
        valid = padding.valid(query, lengths)
        key, value, decay, beta = (
            None if tensor is None else padding.cleared(tensor, valid)
            for tensor in (key, value, decay, beta)
        )
    attributes = [node.attributes[name] for name in _KEPT if name in node.attributes]
    inputs = [query, key, value, past, decay, beta]
    while inputs[-1] is None:
        inputs.pop()
    standard = ir.Node("", LINEAR_ATTENTION, inputs, attributes, num_outputs=2)
    output, present = new.append(standard)
    return [output if is_full else padding.cleared(output, valid), present]
