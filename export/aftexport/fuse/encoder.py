"""Finds what surrounds the attention in an exported graph, and makes it one operator each.

    Add(X, Add(MatMul(Gelu(Add(MatMul(LayerNorm(X), W_in), b_in)), W_out), b_out))
                                          -> LayerNormFeedForward
    Add(MatMul(LayerNorm(X), W_i), b_i)   -> LayerNormLinear, for all i at once, and a Split
    Add(R, Add(MatMul(X, W), b))          -> LinearResidual

Matched by structure, axes and constants; a value that anything else reads stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from aftexport.domain import DOMAIN, PLUGIN_ATTRIBUTES

GELU_OPSET = 20
"""The first opset whose Gelu is one node; before it the feed-forward network stays as it is."""


@dataclass(frozen=True)
class _Linear:
    """``Add(MatMul(x, weight), bias)`` with constant weight and bias."""

    product: ir.Node
    addition: ir.Node
    x: ir.Value
    weight: ir.Value
    bias: ir.Value

    @property
    def output(self) -> ir.Value:
        return self.addition.outputs[0]


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
    if not _is_norm(norm) or model.opset_imports[""] < GELU_OPSET:
        return
    inner = _only_linear(norm.outputs[0])
    gelu = _only_user(inner.output, "Gelu") if inner else None
    if inner is None or gelu is None or gelu.attributes.get_string("approximate", "none") != "none":
        return
    outer = _only_linear(gelu.outputs[0])
    end = _only_user(outer.output, "Add") if outer else None
    x = norm.inputs[0]
    if outer is None or end is None or _other_input(end, outer.output) is not x:
        return
    inputs = [*norm.inputs, inner.weight, inner.bias, outer.weight, outer.bias]
    attributes: dict[str, float | str] = {"epsilon": _epsilon(norm), "precision": precision}
    _replace(
        "LayerNormFeedForward",
        inputs,
        attributes,
        [norm, inner.product, inner.addition, gelu, outer.product, outer.addition, end],
    )


def _fuse_norm_linear(model: ir.Model, norm: ir.Node, precision: str) -> None:
    if not _is_norm(norm) or norm.outputs[0].is_graph_output():
        return
    users = [user for user, _ in norm.outputs[0].uses()]
    linears = [_linear(user) for user in users]
    found = [linear for linear in linears if linear is not None and linear.x is norm.outputs[0]]
    if not found or len(found) != len(users):
        return
    weight = _side_by_side(model, [linear.weight for linear in found])
    bias = _side_by_side(model, [linear.bias for linear in found])
    fused = _node(
        "LayerNormLinear",
        [*norm.inputs, weight, bias],
        {"epsilon": _epsilon(norm), "precision": precision},
    )
    fused.outputs[0].name = f"{norm.outputs[0].name}_linear"
    norm.graph.insert_after(norm, fused)  # type: ignore[union-attr]
    outputs = [linear.output for linear in found]
    if len(found) == 1:
        results = list(fused.outputs)
    else:
        widths = np.array([_constant(linear.bias).size for linear in found], np.int64)
        sizes = _add_constant(model, f"{fused.outputs[0].name}_widths", widths)
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
    _remove([norm] + [n for linear in found for n in (linear.product, linear.addition)])


def _fuse_linear_residual(model: ir.Model, addition: ir.Node, precision: str) -> None:
    linear = _linear_of(addition)
    end = _only_user(addition.outputs[0], "Add") if linear else None
    if linear is None or end is None:
        return
    residual = _other_input(end, linear.output)
    shapes = (residual.shape, linear.output.shape) if residual is not None else (None, None)
    if residual is None or residual is linear.output or shapes[0] is None or shapes[0] != shapes[1]:
        return
    inputs = [linear.x, linear.weight, linear.bias, residual]
    nodes = [linear.product, linear.addition, end]
    _replace("LinearResidual", inputs, {"precision": precision}, nodes)


def _replace(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, float | str],
    nodes: list[ir.Node],
) -> None:
    """Puts one node where the last of ``nodes`` is, and removes them all."""
    last = nodes[-1]
    old = last.outputs[0]
    fused = _node(op_type, inputs, attributes)
    new = fused.outputs[0]
    new.type, new.shape = old.type, old.shape
    last.graph.insert_after(last, fused)  # type: ignore[union-attr]
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    new.name = name
    _remove(nodes)


def _node(
    op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, float | str]
) -> ir.Node:
    return ir.node(op_type, inputs, {**attributes, **PLUGIN_ATTRIBUTES}, domain=DOMAIN)


def _remove(nodes: list[ir.Node]) -> None:
    graph = nodes[0].graph
    assert graph is not None
    graph.remove(nodes, safe=True)


def _is_norm(node: ir.Node) -> bool:
    x = node.inputs[0] if node.inputs else None
    return (
        node.op_type == "LayerNormalization"
        and len(node.inputs) == 3
        and all(value is not None for value in node.inputs)
        and node.attributes.get_int("axis", -1) in (-1, 2)
        and x is not None
        and x.shape is not None
        and len(x.shape) == 3
    )


def _epsilon(norm: ir.Node) -> float:
    return norm.attributes.get_float("epsilon", 1e-5)


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = [user for user, _ in value.uses()]
    if len(users) != 1 or value.is_graph_output() or users[0].op_type != op_type:
        return None
    return users[0]


def _only_linear(value: ir.Value) -> _Linear | None:
    product = _only_user(value, "MatMul")
    return _linear(product) if product is not None else None


def _linear(product: ir.Node) -> _Linear | None:
    if product.op_type != "MatMul":
        return None
    addition = _only_user(product.outputs[0], "Add")
    return _linear_of(addition) if addition is not None else None


def _linear_of(addition: ir.Node) -> _Linear | None:
    if addition.op_type != "Add":
        return None
    for product_value in addition.inputs:
        product = product_value.producer() if product_value is not None else None
        if product_value is None or product is None or product.op_type != "MatMul":
            continue
        bias = _other_input(addition, product_value)
        x, weight = product.inputs
        if (
            x is not None
            and x.shape is not None
            and len(x.shape) == 3
            and weight is not None
            and bias is not None
            and _rank(weight) == 2
            and _rank(bias) == 1
            and len(product_value.uses()) == 1
        ):
            return _Linear(product, addition, x, weight, bias)
    return None


def _other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    first, second = node.inputs
    return second if first is value else first


def _rank(value: ir.Value) -> int | None:
    """Rank of an initializer; None for anything computed."""
    return len(value.const_value.shape) if value.const_value is not None else None


def _constant(value: ir.Value) -> NDArray[np.generic]:
    assert value.const_value is not None
    return value.const_value.numpy()


def _side_by_side(model: ir.Model, values: list[ir.Value]) -> ir.Value:
    if len(values) == 1:
        return values[0]
    name = "_".join(str(value.name) for value in values)
    return _add_constant(model, name, np.concatenate([_constant(v) for v in values], axis=-1))


def _add_constant(model: ir.Model, name: str, array: NDArray[np.generic]) -> ir.Value:
    value = ir.val(name, const_value=ir.tensor(array, name=name))
    model.graph.register_initializer(value)
    return value
