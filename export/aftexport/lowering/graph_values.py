"""The values of a graph: names, axes, constants, reductions over the tokens, random nodes."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.bundle.manifest import Pooling
from aftexport.system.contract import EVIDENCE, main_input

Array = NDArray[np.generic]
Axes = list[str | int]
"""The axes of a value: a number, or the name of a size."""


def names_of(values: Iterable[ir.Value | None]) -> list[str]:
    """Return the names of values; "" for an input that a node leaves out."""
    return ["" if value is None else str(value.name) for value in values]


def axes_of(value: ir.Value) -> Axes:
    """Return the axes of a value: 0 for an unknown one, none if their number is unknown."""
    return [d if isinstance(d, int) else d.value or 0 for d in value.shape or ()]


def dims_of(graph: ir.Graph) -> dict[str, Axes]:
    """Return the axes of inputs, outputs and every described value between them."""
    inner = [value for node in graph for value in node.outputs if value.shape is not None]
    values = (*inner, *graph.outputs, *graph.inputs)
    return {str(value.name): axes_of(value) for value in values}


def main_input_of(graph: ir.Graph) -> ir.Value:
    """Return the input with the tokens."""
    name = main_input(names_of(graph.inputs))
    return next(value for value in graph.inputs if value.name == name)


def constants_of(graph: ir.Graph) -> Mapping[str, Array]:
    """Return initializers and the outputs of Constant nodes by name."""
    return _Constants(graph)


class _Constants(Mapping[str, Array]):
    """A mapping that converts constants on access: all arrays at once would double the memory."""

    def __init__(self, graph: ir.Graph) -> None:
        self._values: dict[str, Any] = {
            name: value.const_value for name, value in graph.initializers.items()
        }
        for node in graph:
            if node.op_type == "Constant":
                value = next(iter(node.attributes.values())).value
                self._values[str(node.outputs[0].name)] = value

    def __getitem__(self, name: str) -> Array:
        value = self._values[name]
        if isinstance(value, ir.TensorProtocol):
            return value.numpy()
        return np.asarray(value)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


_OF_PASSES = re.compile(
    rf"({EVIDENCE}|chunk_).*"
    r"|.*_(float32|alpha_weight|beta_weight|ints_\d+)",
    re.DOTALL,
)
"""Names that later passes give to values that they add, by themselves or from another name."""


def value_names(graph: ir.Graph) -> set[str]:
    """Return the names of all values of a graph and of its subgraphs."""
    values = (*graph.inputs, *graph.initializers.values(), *_inner_values(graph))
    return {str(value.name) for value in values}


def free_name(name: str, taken: Collection[str]) -> str:
    """Return the name, with ``_`` added until no other value has it."""
    while name in taken:
        name += "_"
    return name


def rename_inner_values(graph: ir.Graph) -> None:
    """Rename each inner value whose name is that of an input or output, or of a later pass."""
    ends = (*graph.inputs, *graph.outputs)
    kept = {str(value.name) for value in ends}
    taken = value_names(graph)
    inner = [*graph.initializers.values(), *_inner_values(graph)]
    for value in inner:
        name = str(value.name)
        is_taken = name in kept or _OF_PASSES.fullmatch(name) is not None
        if is_taken and not any(value is end for end in ends):
            value.name = free_name(f"given_{name}_", taken)
            taken.add(value.name)


def _inner_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the results of the nodes, and all values of the subgraphs."""
    for inner in (graph, *graph.subgraphs()):
        if inner is not graph:
            yield from inner.inputs
            yield from inner.initializers.values()
        for node in inner:
            yield from node.outputs


_POOLINGS: Mapping[str, Pooling] = {
    "ReduceSum": "sum",
    "ReduceMax": "max",
    "ReduceLogSumExp": "logsumexp",
}


def pooling(node: ir.Node, constants: Mapping[str, Array]) -> Pooling | None:
    """Return a node's pooling over the tokens; None for none."""
    if node.op_type == "Gather":
        index = constants.get(names_of(node.inputs)[1])
        axis = node.attributes.get_int("axis", 0)
        return "first" if axis == 1 and index is not None and index.tolist() in (0, [0]) else None
    if node.op_type == "TopK":
        attributes = {name: a.value for name, a in node.attributes.items()}
        settings = [attributes.get(name, 1) for name in ("largest", "sorted")]
        is_plain = attributes.get("axis", -1) == 1 and all(settings)
        return "top_k" if is_plain and not node.outputs[1].uses() else None
    return _POOLINGS.get(node.op_type) if _reduces_tokens(node, constants) else None


def is_sum_over_tokens(node: ir.Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node is a ReduceSum over axis 1 only."""
    return node.op_type == "ReduceSum" and _reduces_tokens(node, constants)


def is_reduction_over_tokens(node: ir.Node, constants: Mapping[str, Array]) -> bool:
    """Return whether a node is a ReduceSum or ReduceMean over axis 1 only."""
    return node.op_type in ("ReduceSum", "ReduceMean") and _reduces_tokens(node, constants)


def is_reduction_over_channels(
    node: ir.Node, constants: Mapping[str, Array], rank: int = 3
) -> bool:
    """Return whether a node reduces only the last axis of ``rank`` axes, and keeps it as 1."""
    keeps_axis = node.attributes.get_int("keepdims", 1) == 1
    is_reduction = node.op_type.startswith("Reduce") and keeps_axis
    return is_reduction and _axes(node, constants) in ([-1], [rank - 1])


def _reduces_tokens(node: ir.Node, constants: Mapping[str, Array]) -> bool:
    return _axes(node, constants) == [1]


def _axes(node: ir.Node, constants: Mapping[str, Array]) -> list[int] | None:
    axes = constants.get(names_of(node.inputs)[1]) if len(node.inputs) > 1 else None
    return axes.tolist() if axes is not None else None


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
