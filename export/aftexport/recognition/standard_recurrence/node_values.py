"""A recurrent node of another domain: its attributes, the sizes of its values, and its errors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from aftexport.errors import UsageError
from aftexport.lowering.nodes import NewNodes

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
    """A node with the values of one run."""

    node: ir.Node
    run: Arrays  # the values of the graph by name, for types and for the sizes of fixed axes
    # Attributes that our operators can express, with their defaults.
    defaults: Mapping[str, int | float | str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The node in words."""
        name = self.node.name or (self.node.outputs[0].name if self.node.outputs else "")
        return f"node {name!r} ({title(self.node)})"

    def attributes(self) -> dict[str, int | float | str]:
        """Return all attributes; raises NotTranslatable if there is one that is not known here."""
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


class FullLengths:
    """The lengths int64 ``[B]`` of documents without padding, one value for each tensor of tokens.

    ``known`` has the lengths by tensor, shared by the nodes of a graph.
    """

    def __init__(self, new: NewNodes, known: dict[ir.Value, ir.Value]) -> None:
        self._new = new
        self._known = known

    def of(self, tokens: ir.Value) -> ir.Value:
        """Return the lengths of a tensor ``[B, T, ...]``."""
        if tokens not in self._known:
            count = self._new.add("Shape", tokens, start=1, end=2)
            batch = self._new.add("Shape", tokens, start=0, end=1)
            self._known[tokens] = self._new.add("Expand", count, batch)
        return self._known[tokens]


def are_full(lengths: ir.Value | None, tokens: ir.Value) -> bool:
    """Return whether lengths are those of ``FullLengths`` for a tensor ``[B, T, ...]``."""
    node = None if lengths is None else lengths.producer()
    if node is None or node.op_type != "Expand":
        return False
    sources = [None if value is None else value.producer() for value in node.inputs]
    return all(
        source is not None
        and source.op_type == "Shape"
        and source.inputs[0] is tokens
        and _ends(source) == ends
        for source, ends in zip(sources, ((1, 2), (0, 1)), strict=True)
    )


def _ends(node: ir.Node) -> tuple[int, int | None]:
    end = node.attributes.get("end")
    return node.attributes.get_int("start", 0), None if end is None else end.as_int()


class Padding:
    """The masks of a graph.

    ``known`` has the masks by tokens and lengths, shared by the nodes of a graph.
    """

    def __init__(self, new: NewNodes, known: dict[tuple[ir.Value, ir.Value], ir.Value]) -> None:
        self._new = new
        self._known = known

    def valid(self, tokens: ir.Value, lengths: ir.Value) -> ir.Value:
        """Return the mask of the tokens of ``[B, T, ...]`` within the lengths, ``[B, T, 1]``."""
        if (tokens, lengths) not in self._known:
            new = self._new
            count = new.add("Squeeze", new.add("Shape", tokens, start=1, end=2))
            zero, one = (new.constant(np.array(number)) for number in (0, 1))
            positions = new.add("Range", zero, count, one)
            column = new.add("Unsqueeze", lengths, new.constant([1]))
            rows = new.add("Less", positions, column)
            self._known[tokens, lengths] = new.add("Unsqueeze", rows, new.constant([2]))
        return self._known[tokens, lengths]

    def cleared(self, tensor: ir.Value, valid: ir.Value) -> ir.Value:
        """Return a tensor ``[B, T, ...]`` with 0 at the tokens of padding."""
        new = self._new
        zero = new.add("CastLike", new.constant(np.array(0)), tensor)
        return new.add("Where", valid, tensor, zero)


class NodeReading(ABC):
    """The reading of one node.

    The run of ``given`` is empty if only ``check`` is called.

    Raises:
        NotTranslatable: if the node has an attribute that our operator lacks.
        UsageError: if an attribute has another type.
    """

    operator: ClassVar[str]
    """The operator that the node becomes."""

    @abstractmethod
    def __init__(self, given: ForeignNode) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Raise UsageError if attributes or the presence of inputs violate the definition."""

    @abstractmethod
    def check_sizes(self) -> None:
        """Raise UsageError if the sizes in the run violate the definition."""

    @abstractmethod
    def translate(self, lengths: FullLengths, new: NewNodes) -> list[ir.Value]:
        """Add the nodes that compute the outputs of the node, and return both outputs.

        Raises:
            UsageError: if the node violates its own definition.
            NotTranslatable: if our operator cannot express it.
        """
