"""A recurrent node of another domain: its attributes, the sizes of its values, and its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.errors import UsageError

MICROSOFT = "com.microsoft"
LINEAR_ATTENTION = "LinearAttention"
CAUSAL_CONV = "CausalConvWithState"
FIRST_OPSET = 27
"""The first opset with both operators."""

Arrays = Mapping[str, NDArray[np.generic]]
"""The values of a graph in one run, by name."""
REMEDY = "Correct the node, or export the model again."


class NotTranslatable(Exception):  # noqa: N818, an outcome and not an error
    """The reason why a valid node has no operator of ours."""


def is_standard(node: ir.Node | onnx.NodeProto) -> bool:
    """Return whether a node is one of the operators of ONNX."""
    return node.domain in ("", "ai.onnx") and node.op_type in (LINEAR_ATTENTION, CAUSAL_CONV)


def is_foreign(node: ir.Node) -> bool:
    """Return whether a node is one of the operators of ONNX or of ONNX Runtime."""
    return is_standard(node) or (
        node.domain == MICROSOFT and node.op_type in (LINEAR_ATTENTION, CAUSAL_CONV)
    )


def title(node: ir.Node) -> str:
    """Return the operator of a node with its domain."""
    return f"{node.domain or 'ai.onnx'}.{node.op_type}"


@dataclass(frozen=True)
class ForeignNode:
    """A node with the values of one run.

    Attributes:
        node: the node.
        run: the values of the graph by name, for types and for the sizes of fixed axes.
        defaults: the attributes that our operators can express, with their defaults.
    """

    node: ir.Node
    run: Arrays
    defaults: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The node in words."""
        name = self.node.name or (self.node.outputs[0].name if self.node.outputs else "")
        return f"node {name!r} ({title(self.node)})"

    def attributes(self) -> dict[str, int | float | str]:
        """Return all attributes.

        Raises:
            NotTranslatable: if there is one that is not known here.
        """
        values: dict[str, int | float | str] = dict(self.defaults)
        for name, attribute in self.node.attributes.items():
            if name not in values:
                raise NotTranslatable(f"it has the attribute {name}")
            expected = type(values[name])
            if not isinstance(attribute.value, expected):
                raise self.error(f"{name} of type {expected.__name__}", repr(attribute.value))
            values[name] = attribute.value
        return values

    def input(self, place: int) -> ir.Value | None:
        """Return an input; None if it is absent."""
        inputs = self.node.inputs
        return inputs[place] if place < len(inputs) else None

    def required(self, place: int, name: str) -> ir.Value:
        """Return an input that a node must have."""
        value = self.input(place)
        if value is None:
            raise self.error(f"the input {name}", "none")
        return value

    def output(self, place: int) -> ir.Value | None:
        """Return an output that is read; None for one without a reader."""
        outputs = self.node.outputs
        if place >= len(outputs) or not outputs[place].name:
            return None
        value = outputs[place]
        return value if value.uses() or value.is_graph_output() else None

    def shape(self, value: ir.Value, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of a value in the run, which must have this rank."""
        shape = self.shape_of(value)
        if len(shape) != rank:
            raise self.error(f"{name} of rank {rank}", f"the shape {list(shape)}")
        return shape

    def shape_of(self, value: ir.Value) -> tuple[int, ...]:
        """Return the shape of a value in the run."""
        return self._array(value).shape

    def dtype(self, value: ir.Value) -> np.dtype[np.generic]:
        """Return the type of a value."""
        return self._array(value).dtype

    def _array(self, value: ir.Value) -> NDArray[np.generic]:
        if value.const_value is not None:
            return value.const_value.numpy()
        return self.run[str(value.name)]

    def check(self, holds: bool, expected: str, got: object) -> None:
        """Raise the error of a node unless a condition holds."""
        if not holds:
            raise self.error(expected, got)

    def error(self, expected: str, got: object) -> UsageError:
        """Return the error of a node that its own definition forbids."""
        return UsageError(f"Expected {expected} in {self.label}, got {got}.", REMEDY)
