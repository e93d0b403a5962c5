"""A foreign recurrent node that is read as an operator of ours."""

from abc import ABC, abstractmethod
from typing import ClassVar

import onnx_ir as ir

from aftexport.lowering.nodes import NewNodes
from aftexport.recognition.standard_recurrence.full_lengths import FullLengths
from aftexport.recognition.standard_recurrence.node_values import ForeignNode


class NodeReading(ABC):
    """The reading of one node.

    Args:
        given: the node, with an empty run if only ``check`` is called.

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

        Args:
            lengths: the source of the lengths, which the other operators lack.
            new: the place of the nodes.

        Raises:
            UsageError: if the node violates its own definition.
            NotTranslatable: if our operator cannot express it.
        """
