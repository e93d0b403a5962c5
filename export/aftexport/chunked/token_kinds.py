"""The kinds of values in a graph, by their dependence on the tokens of a document."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

import onnx_ir as ir

from aftexport.lowering.graph_values import Array, Axes, names_of


class NotChunkable(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a model's documents cannot be computed in chunks, as its message."""


class Kind(Enum):
    """The dependence of a value on the document."""

    CONSTANT = auto()
    FILL = auto()
    """Constants equal for every token, in a shape that depends on the document's length."""
    LENGTH = auto()
    """The number of the document's tokens."""
    DOCUMENT = auto()
    """Other values computed from the number of tokens or of documents."""
    POSITIONS = auto()
    """The position of every token, from 0."""
    POSITION_EMBEDDING = auto()
    """A row of learned constants for each position, ``[T, C]`` or ``[1, T, C]``."""
    MASK = auto()
    """A mask of the document's own positions, without padding, ``[B, T, ...]``."""
    TOKENS = auto()
    """``[B, T]`` or ``[B, T, C]``, computed from each token separately, or by an attention."""
    HEADS = auto()
    """``[B, T, H, C]``, computed from each token separately."""
    GIVEN = auto()
    """``[B, ...]``, computed from inputs of the document only, which are known from the start."""
    POOLED = auto()
    """``[B, ...]``, computed from the whole document."""
    STATE = auto()
    """The last state of a recurrence."""
    COMBINED = auto()
    """``[B, T, ...]``, computed from each token and the pooled document, after all attentions."""


OF_TOKENS = frozenset((Kind.TOKENS, Kind.COMBINED))
"""The kinds of outputs that have a row for each token."""
EACH_TOKEN = frozenset((Kind.TOKENS, Kind.HEADS))
"""The kinds of values computed from each token separately."""
OF_DOCUMENT = frozenset((Kind.GIVEN, Kind.POOLED))
"""The kinds of values that a document has only once."""
SIZES = frozenset((Kind.CONSTANT, Kind.FILL, Kind.LENGTH, Kind.DOCUMENT))
"""The kinds of values that may be sizes of a shape."""


@dataclass(frozen=True)
class Step:
    """A node of a graph, with the kinds of all values before it."""

    node: ir.Node
    kinds: Mapping[str, Kind]
    constants: Mapping[str, Array]
    dims: Mapping[str, Axes]  # the axes of all values
    document: Axes  # the axes of documents and tokens

    @property
    def operands(self) -> set[Kind]:
        """The kinds of the inputs."""
        return {self.kinds[name] for name in self.inputs}

    @property
    def inputs(self) -> list[str]:
        """The names of the inputs; "" for one that the node leaves out."""
        return names_of(self.node.inputs)

    @property
    def result(self) -> str:
        """The name of the first output."""
        return str(self.node.outputs[0].name)


def refused(node: ir.Node, reason: str) -> NotChunkable:
    """Return the exception that names a node with the reason against it."""
    return NotChunkable(f"{node.op_type} ({node.outputs[0].name}) {reason}")
