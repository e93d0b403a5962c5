"""Fusion of the layers around the attention in an exported graph, into one operator each.

    Add(X, Add(MatMul(Gelu(Add(MatMul(LayerNorm(X), W_in), b_in)), W_out), b_out))
                                          -> LayerNormFeedForward
    Add(MatMul(LayerNorm(X), W), b)       -> LayerNormLinear
      for three W and b, as in attention  -> LayerNormQueryKeyValue
      for any other number of them        -> LayerNormLinear each: a norm costs less than a Split
    Add(R, Add(MatMul(X, W), b))          -> LinearResidual

    N = LayerNorm(X);  Q = Add(MatMul(N, W_q), b_q);  K = Add(MatMul(N, W_k), b_k)
    Add(X, Add(Q, Add(MatMul(Fastformer(Q, K, Q), W), b)))    -> LayerNormFastformer

The match is by structure, axes and constants. A value with other readers is not fused. Neither is
the causal form of Fastformer, whose pooled query changes with every token.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.lowering import nodes as match
from aftexport.operators.domain import DOMAIN

GELU_OPSET = 20
"""The first opset with a Gelu of one node; below it the feed-forward network is not fused."""


def fuse_encoder(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrite ``model`` in place."""
    for fuse in (_fuse_feed_forward, _fuse_norm_linear, _fuse_linear_residual):
        for node in list(model.graph):
            if node.graph is not None:
                fuse(model, node, precision)
    RemoveUnusedNodesPass()(model)


def _fuse_feed_forward(model: ir.Model, norm: ir.Node, precision: str) -> None:
    if not match.is_norm(norm) or model.opset_imports[""] < GELU_OPSET:
        return
    inner = match.only_linear(norm.outputs[0])
    gelu = match.only_user(inner.output, "Gelu") if inner else None
    if inner is None or gelu is None or gelu.attributes.get_string("approximate", "none") != "none":
        return
    outer = match.only_linear(gelu.outputs[0])
    end = match.only_user(outer.output, "Add") if outer else None
    x = norm.inputs[0]
    if outer is None or end is None or match.other_input(end, outer.output) is not x:
        return
    inputs = [*norm.inputs, inner.weight, inner.bias, outer.weight, outer.bias]
    attributes: dict[str, float | str] = {"epsilon": match.epsilon(norm), "precision": precision}
    match.replace(
        "LayerNormFeedForward",
        inputs,
        attributes,
        [norm, inner.product, inner.addition, gelu, outer.product, outer.addition, end],
    )


def _fuse_norm_linear(model: ir.Model, norm: ir.Node, precision: str) -> None:
    if not match.is_norm(norm) or norm.outputs[0].is_graph_output():
        return
    users = [user for user, _ in norm.outputs[0].uses()]
    linears = [match.linear(user) for user in users]
    readers = [linear for linear in linears if linear is not None and linear.x is norm.outputs[0]]
    if not readers or len(readers) != len(users):
        return
    attributes: dict[str, float | str] = {"epsilon": match.epsilon(norm), "precision": precision}
    op_type, groups = "LayerNormLinear", [[linear] for linear in readers]
    if len(readers) == 3:
        op_type, groups = "LayerNormQueryKeyValue", [readers]
    for group in groups:
        parameters = [value for linear in group for value in (linear.weight, linear.bias)]
        inputs = [*norm.inputs, *parameters]
        fused = match.custom_node(op_type, inputs, attributes, num_outputs=len(group))
        norm.graph.insert_after(norm, fused)  # type: ignore[union-attr]
        for linear, output in zip(group, fused.outputs, strict=True):
            match.take_place(linear.output, output)
    match.remove([norm] + [n for linear in readers for n in (linear.product, linear.addition)])


def _fuse_linear_residual(model: ir.Model, addition: ir.Node, precision: str) -> None:
    linear = match.linear_of(addition)
    end = match.only_user(addition.outputs[0], "Add") if linear else None
    if linear is None or end is None:
        return
    residual = match.other_input(end, linear.output)
    shapes = (residual.shape, linear.output.shape) if residual is not None else (None, None)
    if residual is None or residual is linear.output or shapes[0] is None or shapes[0] != shapes[1]:
        return
    inputs = [linear.x, linear.weight, linear.bias, residual]
    nodes = [linear.product, linear.addition, end]
    match.replace("LinearResidual", inputs, {"precision": precision}, nodes)


MIN_HEAD_CHANNELS = 4
"""The minimum channels of a head for the fusion. A token saves 4 D^2 FLOPs in products and needs
4 D H more in pooling, which runs at a lower rate."""


@dataclass(frozen=True)
class _Layer:
    """The nodes of a pre-norm layer in an exported graph."""

    norm: ir.Node
    queries: match.Linear  # the linear layers before and after the attention
    keys: match.Linear
    attention: ir.Node
    output: match.Linear
    query_residual: ir.Node  # the addition of the queries to the output
    residual: ir.Node  # the addition of the layer's input, which is the last node

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes in the order of the graph."""
        linears = [
            node for one in (self.queries, self.keys) for node in (one.product, one.addition)
        ]
        output = [self.output.product, self.output.addition]
        return [self.norm, *linears, self.attention, *output, self.query_residual, self.residual]

    @property
    def has_other_readers(self) -> bool:
        """Whether a node outside the layer reads a value inside."""
        readers: list[tuple[ir.Value, set[ir.Node]]] = [
            (self.norm.outputs[0], {self.queries.product, self.keys.product}),
            (self.queries.output, {self.attention, self.query_residual}),
            (self.keys.output, {self.attention}),
        ]
        return any(
            value.is_graph_output() or {node for node, _ in value.uses()} != users
            for value, users in readers
        )


def fuse_fastformer(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrite ``model`` in place; runs before ``fuse_encoder``, which fuses parts of the layer."""
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type == "Fastformer":
            _collapse(model, node, precision)
    RemoveUnusedNodesPass()(model)


def _collapse(model: ir.Model, attention: ir.Node, precision: str) -> None:
    layer = _layer_around(attention)
    if layer is None or layer.has_other_readers:
        return
    *_, alpha, beta, lengths = attention.inputs
    if alpha is None or beta is None or match.rank(alpha) != 2 or match.rank(beta) != 2:
        return
    weights = [layer.queries.weight, layer.keys.weight, layer.output.weight]
    heads = attention.attributes.get_int("num_heads", 1)
    dim = match.constant(layer.queries.weight).shape[0]
    has_square_weights = all(match.constant(weight).shape == (dim, dim) for weight in weights)
    if not has_square_weights or dim < heads * MIN_HEAD_CHANNELS:
        return
    name = attention.outputs[0].name
    scale = (dim / heads) ** -0.5
    folded_alpha, folded_beta = _folded(layer.queries.weight, alpha, beta, scale)
    inputs = [
        *layer.norm.inputs,
        layer.queries.weight,
        layer.queries.bias,
        layer.keys.weight,
        layer.keys.bias,
        match.add_constant(model, f"{name}_alpha_weight", folded_alpha),
        match.add_constant(model, f"{name}_beta_weight", folded_beta),
        layer.output.weight,
        layer.output.bias,
        lengths,
    ]
    attributes: dict[str, float | str] = {
        "epsilon": match.epsilon(layer.norm),
        "num_heads": heads,
        "precision": precision,
    }
    match.replace("LayerNormFastformer", inputs, attributes, layer.nodes)


def _layer_around(attention: ir.Node) -> _Layer | None:
    """Return the layer whose attention has the queries as its values; None for another graph."""
    query, key, value, *_ = attention.inputs
    queries, keys = (match.linear_ending_in(v) for v in (query, key))
    output = match.only_linear(attention.outputs[0])
    if queries is None or keys is None or output is None or value is not query:
        return None
    norm = queries.x.producer()
    inner = match.only_user(output.output, "Add")
    end = match.only_user(inner.outputs[0], "Add") if inner else None
    if norm is None or not match.is_norm(norm) or keys.x is not queries.x:
        return None
    if inner is None or end is None or match.other_input(inner, output.output) is not query:
        return None
    x = norm.inputs[0]
    if x is None or match.other_input(end, inner.outputs[0]) is not x:
        return None
    return _Layer(norm, queries, keys, attention, output, inner, end)


def _folded(
    query_weight: ir.Value, alpha: ir.Value, beta: ir.Value, scale: float
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Return the weights of alpha and beta with the query layer and the scale folded in."""
    dtype = match.constant(alpha).dtype
    query, first, second = (
        match.constant(v).astype(np.float64) for v in (query_weight, alpha, beta)
    )
    return (query @ first * scale).astype(dtype), (second * scale).astype(dtype)
