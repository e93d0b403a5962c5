"""Softmax attention in a graph: a softmax of products of tokens, which no operator replaces."""

from collections.abc import Iterator

import onnx

_SCORE_STEPS = ("Add", "Sub", "Mul", "Div", "Where", "Cast", "Reshape", "Unsqueeze", "Squeeze")
"""Operators between a product of tokens and its softmax: scales, masks and biases."""
_PRODUCTS = ("MatMul", "Einsum", "Gemm")
_FIXED_STEPS = ("Transpose", "Cast", "Constant", "Identity", "Reshape", "DequantizeLinear")


def count_softmax_attention(model: onnx.ModelProto) -> int:
    """Return the number of softmax attentions, whose cost grows with the square of the tokens."""
    nodes = [*_nodes(model.graph)]
    producers = {name: node for node in nodes for name in node.output}
    fixed = {tensor.name for tensor in model.graph.initializer}
    for node in nodes:  # weights, also transposed or cast
        computed = [name for name in node.input if name not in fixed]
        if node.op_type == "Constant" or (node.op_type in _FIXED_STEPS and not computed):
            fixed.update(node.output)
    return sum(
        node.op_type == "Attention"
        or (node.op_type == "Softmax" and _is_of_products(node.input[0], producers, fixed))
        for node in nodes
    )


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of the graphs in them: long attention scans its queries."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)


def _is_of_products(name: str, producers: dict[str, onnx.NodeProto], fixed: set[str]) -> bool:
    """Return whether scores are a product of two computed values, such as query and key."""
    seen, ahead = set(), [name]
    while ahead:
        name = ahead.pop()
        node = producers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in _PRODUCTS:
            if sum(given not in fixed for given in node.input[:2]) == 2:
                return True
        elif node.op_type in _SCORE_STEPS:
            ahead.extend(node.input)
    return False
