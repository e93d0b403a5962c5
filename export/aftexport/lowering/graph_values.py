"""The constants of a graph, its main input, and the axes of its values."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.system.contract import main_input

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
