"""Softmaxes of a graph: attentions without an operator, and rewrites of the others as means.

Fastformer and pooling by a softmax become means over the tokens, which have a summary. Plain means
become sums, which are sums of those of chunks.

    Fastformer:  g_q = mean of Q with logits Q Wa / sqrt(d),  P = K * g_q,
                 g_k = mean of P with logits P Wb / sqrt(d),  Y = V * g_k
    pooling:     sum_t softmax_T(s)[t] x[t];  (sum_t x[t]) / T

A mean with one logit for each head is an AFT-conv with a filter of one tap, 0.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.chunked.transposes import move_transposes
from aftexport.lowering.graph_values import (
    axes_of,
    constants_of,
    is_reduction_over_tokens,
    is_sum_over_tokens,
    main_input_of,
)
from aftexport.lowering.nodes import NewNodes
from aftexport.operators.domain import DOMAIN

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


def rewrite_as_means(model: onnx.ModelProto) -> ir.Model:
    """Return the graph of a model of bare operators with these nodes and transposes rewritten."""
    # It shares the weights with model, which stays unchanged.
    rewritten = ir.from_proto(model)
    graph = rewritten.graph
    move_transposes(graph)
    _pooling_by_mean(graph)
    _pooling_by_softmax(graph)
    for node in tuple(graph):
        if node.domain == DOMAIN and node.op_type.removeprefix("Causal") == "Fastformer":
            _fastformer(graph, node)
    RemoveUnusedNodesPass()(rewritten)
    return rewritten


def _fastformer(graph: ir.Graph, node: ir.Node) -> None:
    query, key, value, alpha_weight, beta_weight, lengths = node.inputs
    if alpha_weight is None or alpha_weight.const_value is None:
        return  # a computed weight: the operator stays and has no summary
    weight = alpha_weight.const_value
    dim, num_heads = weight.numpy().shape
    new = NewNodes(graph, "mean")
    typed = weight.dtype.numpy()
    zero = new.constant(np.zeros((num_heads, 1), typed))
    scale = new.constant(np.asarray(1 / math.sqrt(dim // num_heads), typed))
    mean = f"{'Causal' if node.op_type.startswith('Causal') else ''}AftConv"

    def mean_of(values: ir.Value | None, logit_weight: ir.Value | None) -> ir.Value:
        logits = new.add("Mul", new.add("MatMul", values, logit_weight), scale)
        return _mean(new, mean, (values, logits, values, zero, lengths), num_heads)

    keyed = new.add("Mul", key, mean_of(query, alpha_weight))
    result = new.add("Mul", value, mean_of(keyed, beta_weight))
    new.replace(node, result)


def _mean(
    new: NewNodes, op_type: str, inputs: Sequence[ir.Value | None], num_heads: int
) -> ir.Value:
    attributes: dict[str, int | str] = {"num_heads": num_heads, "gate": "none"}
    return new.append(ir.node(op_type, inputs, attributes, domain=DOMAIN))[0]


def _pooling_by_softmax(graph: ir.Graph) -> None:
    """Replace ``ReduceSum(Mul(Softmax(s), x))`` over the tokens by the first row of a mean."""
    constants = constants_of(graph)
    main = main_input_of(graph)
    tokens = axes_of(main)[:2]
    for total in graph:
        if not is_sum_over_tokens(total, constants) or total.attributes.get_int("keepdims", 1) == 1:
            continue
        product = _producer(total.inputs[0], "Mul")
        if product is None:
            continue
        for weights, x in (product.inputs, reversed(product.inputs)):
            softmax = _producer(weights, "Softmax")
            if softmax is None or weights is None or x is None:
                continue
            # The shapes must be one weight per token, and values per token.
            is_per_token = axes_of(weights) == [*tokens, 1] and axes_of(x)[:2] == tokens
            if softmax.attributes.get_int("axis", -1) == 1 and is_per_token:
                _pool_by_mean(graph, total, softmax, x)
                return


def _pool_by_mean(graph: ir.Graph, total: ir.Node, softmax: ir.Node, x: ir.Value) -> None:
    new = NewNodes(graph, "mean")
    # A chunk has one document, so its length is the axis; the model may have no input lengths.
    count = new.add("Shape", main_input_of(graph), start=1, end=2)
    zero = new.constant(np.zeros((1, 1), np.float32))
    mean = _mean(new, "AftConv", (x, softmax.inputs[0], x, zero, count), 1)
    first = new.add("Gather", mean, new.constant(np.asarray(0)), axis=1)
    new.replace(total, first)


def _pooling_by_mean(graph: ir.Graph) -> None:
    """Replace ``ReduceMean`` over the tokens by a sum and a division by the number of tokens."""
    constants = constants_of(graph)
    main = main_input_of(graph)
    for node in tuple(graph):
        if node.op_type != "ReduceMean" or not is_reduction_over_tokens(node, constants):
            continue
        given = node.inputs[0]
        if given is not None and axes_of(given)[:2] not in ([], axes_of(main)[:2]):
            continue  # its second axis is another one
        mean = node.outputs[0]
        new = NewNodes(graph, "mean")
        total = new.append(ir.Node("", "ReduceSum", node.inputs, node.attributes.values()))[0]
        tokens = new.add("Shape", main, start=1, end=2)
        count = new.add("CastLike", tokens, total)
        total.type, total.shape = mean.type, mean.shape
        count.type, count.shape = mean.type, ir.Shape([1])
        new.replace(node, new.add("Div", total, count))


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value; None unless it is an ``op_type``."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type else None
