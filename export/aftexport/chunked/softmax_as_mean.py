"""Rewrites for chunks of Fastformer, and of pooling by a softmax or a mean.

Fastformer and pooling by a softmax become means over the tokens, which have a summary. Plain means
become sums, which are sums of those of chunks.

    Fastformer:  g_q = mean of Q with logits Q Wa / sqrt(d),  P = K * g_q,
                 g_k = mean of P with logits P Wb / sqrt(d),  Y = V * g_k
    pooling:     sum_t softmax_T(s)[t] x[t];  (sum_t x[t]) / T

A mean with one logit for each head is an AFT-conv with a filter of one tap, 0.
"""

import math

import numpy as np
import onnx
import onnx.inliner
import onnx.parser
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.operators.domain import DOMAIN, VERSION, opset_of
from aftexport.passes.graph_values import constants_of, dims_of, main_input_of
from aftexport.passes.token_reductions import is_reduction_over_tokens, is_sum_over_tokens

_LOCAL = "aftexport.chunked"


def rewrite_as_means(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a graph of bare operators with these nodes rewritten."""
    rewritten = onnx.ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    opset = opset_of(model)
    _pooling_by_mean(graph)
    _pooling_by_softmax(graph)
    weights = {i.name: i for i in graph.initializer}
    functions: dict[str, onnx.FunctionProto] = {}
    for node in graph.node:
        if node.domain == DOMAIN and node.op_type.removeprefix("Causal") == "Fastformer":
            weight = weights.get(node.input[3])
            if weight is None:
                continue  # a computed weight: the operator stays and has no summary
            dim, num_heads = weight.dims
            function = _fastformer(node.op_type, num_heads, opset)
            functions[function.name] = function
            node.domain, node.op_type = _LOCAL, function.name
            node.input.append(_constant(graph, np.zeros((num_heads, 1)), weight.data_type))
            scale = np.asarray(1 / math.sqrt(dim // num_heads))
            node.input.append(_constant(graph, scale, weight.data_type))
            del node.attribute[:]
    if functions:
        rewritten.functions.extend(functions.values())
        rewritten.opset_import.append(onnx.helper.make_opsetid(_LOCAL, 1))
        rewritten = onnx.inliner.inline_local_functions(rewritten)
    used = ir.from_proto(rewritten)
    RemoveUnusedNodesPass()(used)
    return ir.to_proto(used)


def _constant(graph: onnx.GraphProto, value: NDArray[np.generic], element: int) -> str:
    name = f"mean_constant_{len(graph.initializer)}"
    typed = value.astype(onnx.helper.tensor_dtype_to_np_dtype(element))
    graph.initializer.append(onnx.numpy_helper.from_array(typed, name))
    return name


def _fastformer(op_type: str, num_heads: int, opset: int) -> onnx.FunctionProto:
    causal = "Causal" if op_type.startswith("Causal") else ""
    mean = f'{DOMAIN}.{causal}AftConv <num_heads = {num_heads}, gate = "none">'
    return onnx.parser.parse_function(f"""
        <domain: "{_LOCAL}", opset_import: ["" : {opset}, "{DOMAIN}" : {VERSION}]>
        {op_type}_{num_heads}
            (query, key, value, alpha_weight, beta_weight, lengths, filter, scale) => (output)
        {{
            alpha_products = MatMul(query, alpha_weight)
            alpha_logits = Mul(alpha_products, scale)
            global_query = {mean} (query, alpha_logits, query, filter, lengths)
            keyed = Mul(key, global_query)
            beta_products = MatMul(keyed, beta_weight)
            beta_logits = Mul(beta_products, scale)
            global_key = {mean} (keyed, beta_logits, keyed, filter, lengths)
            output = Mul(value, global_key)
        }}
    """)


def _pooling_by_softmax(graph: onnx.GraphProto) -> None:
    """Replace ``ReduceSum(Mul(Softmax(s), x))`` over the tokens by the first row of a mean."""
    producers = {output: node for node in graph.node for output in node.output}
    constants = constants_of(graph)
    dims = dims_of(graph)
    main = main_input_of(graph)
    tokens = dims[main][:2]

    def producer(name: str, op_type: str) -> onnx.NodeProto | None:
        node = producers.get(name)
        return node if node is not None and node.op_type == op_type else None

    for index, total in enumerate(graph.node):
        if not is_sum_over_tokens(total, constants) or _keeps_axis(total):
            continue
        product = producer(total.input[0], "Mul")
        if product is None:
            continue
        for weights, x in (product.input, reversed(product.input)):
            softmax = producer(weights, "Softmax")
            # The shapes must be one weight per token, and values per token.
            is_per_token = dims.get(weights) == [*tokens, 1] and dims.get(x, [])[:2] == tokens
            if softmax is not None and _axis(softmax) == 1 and is_per_token:
                name = total.output[0]
                filter = _constant(graph, np.zeros((1, 1)), onnx.TensorProto.FLOAT)
                row = _constant(graph, np.asarray(0), onnx.TensorProto.INT64)
                # A chunk has one document, so its length is the axis; the model may have no
                # input lengths.
                count = onnx.helper.make_node("Shape", [main], [f"{name}_tokens"], start=1, end=2)
                mean = onnx.helper.make_node(
                    "AftConv",
                    [x, softmax.input[0], x, filter, f"{name}_tokens"],
                    [f"{name}_mean"],
                    domain=DOMAIN,
                    num_heads=1,
                    gate="none",
                )
                first = onnx.helper.make_node("Gather", [f"{name}_mean", row], [name], axis=1)
                graph.node[index].CopyFrom(first)
                graph.node.insert(index, mean)
                graph.node.insert(index, count)
                return


def _pooling_by_mean(graph: onnx.GraphProto) -> None:
    """Replace ``ReduceMean`` over the tokens by a sum and a division by the number of tokens."""
    constants = constants_of(graph)
    main = main_input_of(graph)
    described = {value.name: value for value in (*graph.value_info, *graph.output)}
    nodes = []
    for node in graph.node:
        if node.op_type != "ReduceMean" or not is_reduction_over_tokens(node, constants):
            nodes.append(node)
            continue
        name = node.output[0]
        total = onnx.helper.make_node("ReduceSum", node.input, [f"{name}_sum"])
        total.attribute.extend(node.attribute)
        if name in described:
            graph.value_info.add().CopyFrom(described[name])
            graph.value_info[-1].name = f"{name}_sum"
            element = described[name].type.tensor_type.elem_type
            count = onnx.helper.make_tensor_value_info(f"{name}_count", element, [1])
            graph.value_info.append(count)
        nodes += [
            total,
            onnx.helper.make_node("Shape", [main], [f"{name}_tokens"], start=1, end=2),
            onnx.helper.make_node("CastLike", [f"{name}_tokens", f"{name}_sum"], [f"{name}_count"]),
            onnx.helper.make_node("Div", [f"{name}_sum", f"{name}_count"], [name]),
        ]
    del graph.node[:]
    graph.node.extend(nodes)


def _keeps_axis(node: onnx.NodeProto) -> bool:
    """Return whether a reduction keeps its axis with size 1."""
    return next((a.i == 1 for a in node.attribute if a.name == "keepdims"), True)


def _axis(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "axis"), -1)
