"""The constants of a graph, its main input, and the axes of its values."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.contract import main_input

Array = NDArray[np.generic]
Axes = list[str | int]
"""The axes of a value: a number, or the name of a size."""


def dims_of(graph: onnx.GraphProto) -> dict[str, Axes]:
    """Return the axes of every described value."""
    return {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.output, *graph.input)
    }


def main_input_of(graph: onnx.GraphProto) -> str:
    """Return the name of the input with the tokens."""
    return main_input([value.name for value in graph.input])


def constants_of(graph: onnx.GraphProto) -> Mapping[str, Array]:
    """Return initializers and the outputs of Constant nodes by name."""
    return _Constants(graph)


class _Constants(Mapping[str, Array]):
    """A mapping that converts constants on access: all arrays at once would double the memory."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._values: dict[str, Any] = {i.name: i for i in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                value = onnx.helper.get_attribute_value(node.attribute[0])
                self._values[node.output[0]] = value

    def __getitem__(self, name: str) -> Array:
        value = self._values[name]
        if isinstance(value, onnx.TensorProto):
            return onnx.numpy_helper.to_array(value)
        return np.asarray(value)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
