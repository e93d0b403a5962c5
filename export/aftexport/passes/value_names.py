"""The names of the values of a graph, which must differ, also between a graph and its subgraphs."""

from collections.abc import Collection, Iterator

import onnx_ir as ir


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
    """Rename each inner value that has the name of an input or an output of the graph."""
    ends = (*graph.inputs, *graph.outputs)
    kept = {str(value.name) for value in ends}
    taken = value_names(graph)
    inner = [*graph.initializers.values(), *_inner_values(graph)]
    for value in inner:
        if str(value.name) in kept and not any(value is end for end in ends):
            value.name = free_name(str(value.name), taken)
            taken.add(value.name)


def _inner_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the results of the nodes, and all values of the subgraphs."""
    for inner in (graph, *graph.subgraphs()):
        if inner is not graph:
            yield from inner.inputs
            yield from inner.initializers.values()
        for node in inner:
            yield from node.outputs
