"""Fusion of the layers around the attention in an exported graph, into one operator each.

    F(X) = H W_out + b_out,  H = activation(X W_in + b_in), perhaps times X W_up + b_up
    Add(X, F(norm(X))) or Add(X, F(X))    -> LayerNormFeedForward
    norm(X) W + b                         -> LayerNormLinear
      for three W and b, as in attention  -> LayerNormQueryKeyValue
      for any other number of them        -> LayerNormLinear each: a norm costs less than a Split
    Add(R, X W + b)                       -> LinearResidual
    X W + b                               -> as behind a norm, without one

    N = LayerNorm(X);  Q = Add(MatMul(N, W_q), b_q);  K = Add(MatMul(N, W_k), b_k)
    Add(X, Add(Q, Add(MatMul(Fastformer(Q, K, Q), W), b)))    -> LayerNormFastformer

A product whose columns a Split or Slices take apart becomes one product for each part. A norm is a
layer norm or an RMS norm. One with other readers, as behind a sublayer (post-norm), stays a node.
A value inside an operator that has other readers prevents the fusion. The causal form of Fastformer
is not fused either: its pooled query changes with every token.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.lowering import encoder_layers as layers
from aftexport.lowering import nodes as match
from aftexport.operators.domain import DOMAIN

MIN_COLUMNS = 16
"""The minimum columns of a product that is not fused with anything else. Reading x takes longer
than a product with few columns, such as the classes of a head or the logits of heads."""


def fuse_encoder(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrite ``model`` in place."""
    for fuse in (
        _cut_product,
        _fuse_feed_forward,
        _fuse_normed_linears,
        _fuse_linear_residual,
        _fuse_linears,
    ):
        for node in list(model.graph):
            if node.graph is not None:
                fuse(node, precision)
    RemoveUnusedNodesPass()(model)


def _cut_product(product: ir.Node, precision: str) -> None:
    layer = layers.linear(product)
    if layer is None or product.graph is None:
        return
    parts, cutters = layers.parts_of(layer)
    if not parts:
        return
    graph = product.graph
    new = match.NewNodes(graph, f"{layer.output.name}_part")
    results = []
    for part in parts:
        weight = match.constant(layer.weight)[:, part.begin : part.end]
        result = new.add("MatMul", layer.x, new.constant(np.ascontiguousarray(weight)))
        if layer.bias is not None:
            bias = match.constant(layer.bias)[part.begin : part.end]
            result = new.add("Add", result, new.constant(bias.copy()))
        results.append(result)
    graph.insert_after(layer.nodes[-1], new.nodes)
    for part, result in zip(parts, results, strict=True):
        match.take_place(part.value, result)
    match.remove([*layer.nodes, *cutters])


def _fuse_feed_forward(end: ir.Node, precision: str) -> None:
    if end.op_type != "Add" or end.domain != "":
        return
    for change in end.inputs:
        outer = layers.linear_ending_in(change)
        hidden = layers.hidden_ending_in(outer.x) if outer else None
        residual = match.other_input(end, change) if change is not None else None
        if outer is None or hidden is None or residual is None:
            continue
        x, nodes = hidden.inner.x, [*hidden.nodes, *outer.nodes, end]
        inputs: list[ir.Value | None] = [x, None, None]
        attributes: dict[str, float | str] = {"activation": hidden.activation}
        norm = layers.norm_ending_in(x)
        if norm is not None and norm.x is residual:
            nodes = [*norm.nodes, *nodes]
            inputs, attributes = norm.inputs, attributes | norm.attributes
        elif x is not residual:
            continue
        if outer.columns != match.constant(hidden.inner.weight).shape[0]:
            continue
        if match.are_closed(nodes):
            inputs += [hidden.inner.weight, hidden.inner.bias, outer.weight, outer.bias]
            inputs += [hidden.up.weight, hidden.up.bias] if hidden.up else []
            attributes["precision"] = precision
            match.replace("LayerNormFeedForward", inputs, attributes, nodes)
            return


def _fuse_normed_linears(last: ir.Node, precision: str) -> None:
    norm = layers.norm_ending_at(last)
    if norm is None or norm.output.is_graph_output():
        return
    readers = _linears_of(norm.output)
    if not readers or len(readers) != len(norm.output.uses()):
        return
    attributes = norm.attributes | {"precision": precision}
    _replace_linears(readers, norm.inputs, attributes)
    match.remove(list(norm.nodes))


def _fuse_linears(product: ir.Node, precision: str) -> None:
    """Fuse the linear layers that read one value, of which ``product`` is the first."""
    layer = layers.linear(product)
    if layer is None:
        return
    readers = _linears_of(layer.x)
    if len(readers) != 3:
        readers = [reader for reader in readers if reader.columns >= MIN_COLUMNS]
    if readers:
        _replace_linears(readers, [layer.x, None, None], {"precision": precision})


def _linears_of(x: ir.Value) -> list[layers.Linear]:
    """Return the linear layers that read ``x``."""
    found = [layers.linear(user) for user, _ in x.uses()]
    return [layer for layer in found if layer is not None and layer.x is x]


def _replace_linears(
    readers: list[layers.Linear],
    first_inputs: list[ir.Value | None],
    attributes: dict[str, float | str],
) -> None:
    """Replace linear layers that read one value by operators with these inputs before theirs."""
    op_type, groups = "LayerNormLinear", [[layer] for layer in readers]
    if len(readers) == 3:
        op_type, groups = "LayerNormQueryKeyValue", [readers]
    place = readers[0].product
    for group in groups:
        parameters = [value for layer in group for value in (layer.weight, layer.bias)]
        inputs = [*first_inputs, *parameters]
        fused = match.custom_node(op_type, inputs, attributes, num_outputs=len(group))
        place.graph.insert_before(place, fused)  # type: ignore[union-attr]
        for layer, output in zip(group, fused.outputs, strict=True):
            match.take_place(layer.output, output)
    match.remove([node for layer in readers for node in layer.nodes])


def _fuse_linear_residual(end: ir.Node, precision: str) -> None:
    if end.op_type != "Add" or end.domain != "":
        return
    for change in end.inputs:
        layer = layers.linear_ending_in(change)
        residual = match.other_input(end, change) if change is not None else None
        if layer is None or residual is None or residual is change:
            continue
        shapes = residual.shape, layer.output.shape
        nodes = [*layer.nodes, end]
        if shapes[0] is not None and shapes[0] == shapes[1] and match.are_closed(nodes):
            inputs = [layer.x, layer.weight, layer.bias, residual]
            match.replace("LinearResidual", inputs, {"precision": precision}, nodes)
            return


MIN_HEAD_CHANNELS = 4
"""The minimum channels of a head for the fusion. A token saves 4 D^2 FLOPs in products and needs
4 D H more in pooling, which runs at a lower rate."""


@dataclass(frozen=True)
class _Layer:
    """The nodes of a pre-norm layer in an exported graph."""

    norm: layers.Norm
    queries: layers.Linear  # the linear layers before and after the attention
    keys: layers.Linear
    attention: ir.Node
    output: layers.Linear
    query_residual: ir.Node  # the addition of the queries to the output
    residual: ir.Node  # the addition of the layer's input, which is the last node

    @property
    def nodes(self) -> list[ir.Node]:
        """The nodes in the order of the graph."""
        before = [*self.norm.nodes, *self.queries.nodes, *self.keys.nodes]
        output = [*self.output.nodes, self.query_residual, self.residual]
        return [*before, self.attention, *output]


def fuse_fastformer(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrite ``model`` in place; runs before ``fuse_encoder``, which fuses parts of the layer."""
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type == "Fastformer":
            _collapse(model, node, precision)
    RemoveUnusedNodesPass()(model)


def _collapse(model: ir.Model, attention: ir.Node, precision: str) -> None:
    layer = _layer_around(attention)
    if layer is None or not match.are_closed(layer.nodes):
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
        "epsilon": layer.norm.epsilon,
        "num_heads": heads,
        "precision": precision,
    }
    match.replace("LayerNormFastformer", inputs, attributes, layer.nodes)


def _layer_around(attention: ir.Node) -> _Layer | None:
    """Return the layer whose attention has the queries as its values; None for another graph."""
    query, key, value, *_ = attention.inputs
    queries, keys = (layers.linear_ending_in(v) for v in (query, key))
    output = layers.only_linear(attention.outputs[0])
    if queries is None or keys is None or output is None or value is not query:
        return None
    if not all(layer.bias for layer in (queries, keys, output)):
        return None
    norm = layers.norm_ending_in(queries.x)
    inner = match.only_user(output.output, "Add")
    end = match.only_user(inner.outputs[0], "Add") if inner else None
    if norm is None or norm.kind != "layer" or norm.bias is None or keys.x is not queries.x:
        return None
    if inner is None or end is None or match.other_input(inner, output.output) is not query:
        return None
    if match.other_input(end, inner.outputs[0]) is not norm.x:
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
