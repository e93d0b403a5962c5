"""Fusion of a pre-norm Fastformer layer in an exported graph into one operator.

    N = LayerNorm(X);  Q = Add(MatMul(N, W_q), b_q);  K = Add(MatMul(N, W_k), b_k)
    Add(X, Add(Q, Add(MatMul(Fastformer(Q, K, Q), W), b)))    -> LayerNormFastformer

The match is by structure, axes and constants. A value with other readers is not fused, and neither
is the causal form, whose pooled query changes with every token.
"""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.operators.domain import DOMAIN
from aftexport.passes import nodes as match

MIN_HEAD_CHANNELS = 4
"""The minimum channels of a head for the fusion. A token saves 4 D^2 FLOPs in products and needs
4 D H more in pooling, which runs at a lower rate."""


def fuse_fastformer(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrite ``model`` in place; runs before ``fuse_encoder``, which fuses parts of the layer.

    Args:
        model: an exported graph whose values have known ranks.
        precision: the precision of the products, see the operator.
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
    # Only the layer itself may read the values inside.
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
    if (
        any(match.constant(w).shape != (dim, dim) for w in weights)
        or dim < heads * MIN_HEAD_CHANNELS
    ):
        return
    if alpha is None or beta is None or match.rank(alpha) != 2 or match.rank(beta) != 2:
        return
    name = attention.outputs[0].name
    folded_alpha, folded_beta = _folded(queries.weight, alpha, beta, (dim / heads) ** -0.5)
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


def _folded(
    query_weight: ir.Value, alpha: ir.Value, beta: ir.Value, scale: float
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Return the weights of alpha and beta with the query layer and the scale folded in."""
    dtype = match.constant(alpha).dtype
    query, first, second = (
        match.constant(v).astype(np.float64) for v in (query_weight, alpha, beta)
    )
    return (query @ first * scale).astype(dtype), (second * scale).astype(dtype)
