"""Finds what surrounds the attention in an exported graph, and makes it one operator each.

    Add(X, Add(MatMul(Gelu(Add(MatMul(LayerNorm(X), W_in), b_in)), W_out), b_out))
                                          -> LayerNormFeedForward
    Add(MatMul(LayerNorm(X), W_i), b_i)   -> LayerNormLinear, for all i at once, and a Split
    Add(R, Add(MatMul(X, W), b))          -> LinearResidual

Matched by structure, axes and constants; a value that anything else reads stays.
"""

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.fuse import _matching as match

GELU_OPSET = 20
"""The first opset whose Gelu is one node; before it the feed-forward network stays as it is."""


def fuse_encoder(model: ir.Model, *, precision: str = "fp32") -> None:
    """Rewrites ``model`` in place.

    Args:
        model: an exported graph whose values carry their ranks.
        precision: of the products; see the operators.
    """
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
    found = [linear for linear in linears if linear is not None and linear.x is norm.outputs[0]]
    if not found or len(found) != len(users):
        return
    weight = match.side_by_side(model, [linear.weight for linear in found])
    bias = match.side_by_side(model, [linear.bias for linear in found])
    fused = match.custom_node(
        "LayerNormLinear",
        [*norm.inputs, weight, bias],
        {"epsilon": match.epsilon(norm), "precision": precision},
    )
    fused.outputs[0].name = f"{norm.outputs[0].name}_linear"
    norm.graph.insert_after(norm, fused)  # type: ignore[union-attr]
    outputs = [linear.output for linear in found]
    if len(found) == 1:
        results = list(fused.outputs)
    else:
        widths = np.array([match.constant(linear.bias).size for linear in found], np.int64)
        sizes = match.add_constant(model, f"{fused.outputs[0].name}_widths", widths)
        split = ir.node(
            "Split",
            [fused.outputs[0], sizes],
            {"axis": -1},
            num_outputs=len(found),
            name=f"node_{fused.outputs[0].name}_split",
        )
        norm.graph.insert_after(fused, split)  # type: ignore[union-attr]
        results = list(split.outputs)
    for old, new in zip(outputs, results, strict=True):
        name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        new.type, new.shape = old.type, old.shape
        new.name = name
    match.remove([norm] + [n for linear in found for n in (linear.product, linear.addition)])


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
