"""Collapses a pre-norm Fastformer layer in an exported graph into one operator.

    N = LayerNorm(X);  Q = Add(MatMul(N, W_q), b_q);  K = Add(MatMul(N, W_k), b_k)
    Add(X, Add(Q, Add(MatMul(Fastformer(Q, K, Q), W), b)))    -> LayerNormFastformer

Matched by structure, axes and constants; a value that anything else reads stays, and the
causal form, whose pooled query changes with every token, does too.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.operators.domain import DOMAIN
from aftexport.passes import nodes as match

NARROWEST_HEAD = 4
"""Collapse where heads are at least this many channels wide: a token saves 4 D^2 FLOPs in products
and takes 4 D H more in pooling, at a lower rate."""


def fuse_fastformer(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrites ``model`` in place; before ``fuse_encoder``, which takes the layer's parts.

    Args:
        model: an exported graph whose values carry their ranks.
        precision: of the products; see the operator.
    """
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type == "Fastformer":
            _collapse(model, node, precision)
    RemoveUnusedNodesPass()(model)


def _collapse(model: ir.Model, attention: ir.Node, precision: str) -> None:
    query, key, value, alpha, beta, lengths = attention.inputs
    queries, keys = (match.linear_ending_in(v) for v in (query, key))
    output = match.only_linear(attention.outputs[0])
    if queries is None or keys is None or output is None or value is not query:
        return
    norm = queries.x.producer()
    inner = match.only_user(output.output, "Add")
    end = match.only_user(inner.outputs[0], "Add") if inner else None
    if norm is None or not match.is_norm(norm) or keys.x is not queries.x:
        return
    if inner is None or end is None or match.other_input(inner, output.output) is not query:
        return
    x = norm.inputs[0]
    if x is None or match.other_input(end, inner.outputs[0]) is not x:
        return
    # Everything inside is read by the layer alone.
    readers = [
        (norm.outputs[0], {queries.product, keys.product}),
        (queries.output, {attention, inner}),
        (keys.output, {attention}),
    ]
    if any(v.is_graph_output() or {n for n, _ in v.uses()} != users for v, users in readers):
        return
    weights = [queries.weight, keys.weight, output.weight]
    heads = attention.attributes.get_int("num_heads", 1)
    dim = match.constant(queries.weight).shape[0]
    if any(match.constant(w).shape != (dim, dim) for w in weights) or dim < heads * NARROWEST_HEAD:
        return
    if alpha is None or beta is None or match.rank(alpha) != 2 or match.rank(beta) != 2:
        return

    scale = (dim / heads) ** -0.5
    query_weight, alpha_weight, beta_weight = (
        match.constant(v).astype(np.float64) for v in (queries.weight, alpha, beta)
    )
    dtype = match.constant(alpha).dtype
    name = attention.outputs[0].name
    folded_alpha = (query_weight @ alpha_weight * scale).astype(dtype)
    folded_beta = (beta_weight * scale).astype(dtype)
    inputs = [
        *norm.inputs,
        queries.weight,
        queries.bias,
        keys.weight,
        keys.bias,
        match.add_constant(model, f"{name}_alpha_weight", folded_alpha),
        match.add_constant(model, f"{name}_beta_weight", folded_beta),
        output.weight,
        output.bias,
        lengths,
    ]
    attributes: dict[str, float | str] = {
        "epsilon": match.epsilon(norm),
        "num_heads": heads,
        "precision": precision,
    }
    nodes = [norm]
    for linear in (queries, keys):
        nodes += [linear.product, linear.addition]
    nodes += [attention, output.product, output.addition, inner, end]
    match.replace("LayerNormFastformer", inputs, attributes, nodes)
