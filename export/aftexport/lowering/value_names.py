"""The names of the values of a graph, which must differ, also between a graph and its subgraphs."""

import re
from collections.abc import Collection, Iterator

import onnx_ir as ir

from aftexport.system.contract import EVIDENCE

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
