"""Nodes whose outputs differ from run to run, so that two runs cannot be compared."""

from collections.abc import Iterator

import onnx
import onnx_ir as ir

_RANDOM = (
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial"),
)


def random_node(model: onnx.ModelProto) -> str | None:
    """Return a description of the first random node; None without a random node."""
    graph = ir.from_proto(model)
    functions = [n for function in graph.functions.values() for n in function.all_nodes()]
    return next(_named([*graph.graph.all_nodes(), *functions]), None)


def _named(nodes: list[ir.Node]) -> Iterator[str]:
    for node in nodes:
        name = repr(node.name or node.outputs[0].name)
        if node.op_type == "Dropout" and _is_training(node):
            yield f"node {name} is a Dropout in training mode"
        elif node.op_type in _RANDOM:
            yield f"node {name} is a {node.op_type}"


def _is_training(node: ir.Node) -> bool:
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    ratio, mode = (None if i is None else _constant(i) for i in node.inputs[1:3])
    return bool(mode) and ratio != 0


def _constant(value: ir.Value) -> float | None:
    tensor = ir.convenience.get_const_tensor(value)
    return float(tensor.numpy().reshape(-1)[0]) if tensor is not None and tensor.size else None
