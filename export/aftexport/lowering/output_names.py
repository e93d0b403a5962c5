"""The names of a graph's outputs, which its other values must not have."""

from collections.abc import Mapping, Sequence

import onnx

_PREFIX = "output_of_forward_"


def passing_names(names: Sequence[str]) -> list[str]:
    """Return names for the outputs during the translation, which no other value has.

    torch.onnx names values by their operators, and fails if an output has the same name.
    """
    return [f"{_PREFIX}{place}" for place in range(len(names))]


def name_outputs(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Give the outputs of a graph their names, in place.

    Args:
        model: a graph whose outputs have ``passing_names``.
        names: the names in the order of the outputs; another value of such a name is renamed.
    """
    graph = model.graph
    taken = {name for node in graph.node for name in (*node.output, *node.input)}
    taken |= {value.name for value in (*graph.initializer, *graph.input)}
    renamed = {}
    for name in taken & set(names):
        count = 1
        while (other := f"{name}_{count}") in taken or other in names:
            count += 1
        renamed[name] = other
        taken.add(other)
    renamed |= dict(zip(passing_names(names), names, strict=True))
    _rename(graph, renamed)


def _rename(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _rename(inner, renamed)
    for value in (*graph.output, *graph.value_info, *graph.initializer):
        value.name = renamed.get(value.name, value.name)
