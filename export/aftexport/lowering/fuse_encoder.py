"""Fusion of the layers around the attention in an exported graph, into one operator each.

    Add(X, Add(MatMul(Gelu(Add(MatMul(LayerNorm(X), W_in), b_in)), W_out), b_out))
                                          -> LayerNormFeedForward
    Add(MatMul(LayerNorm(X), W), b)       -> LayerNormLinear
      for three W and b, as in attention  -> LayerNormQueryKeyValue
      for any other number of them        -> LayerNormLinear each: a norm costs less than a Split
    Add(R, Add(MatMul(X, W), b))          -> LinearResidual

The match is by structure, axes and constants. A value with other readers is not fused.
"""

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.lowering import nodes as match

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
