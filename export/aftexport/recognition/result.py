"""The result of a search for mechanisms in a graph."""

from dataclasses import dataclass, field

from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.standard_recurrence.translation import Replacement


@dataclass(frozen=True)
class Match:
    """A rewrite that was made.

    Attributes:
        mechanism: the stem of the mechanism's file.
        operator: the operator of the domain.
        value: the name of the computed value.
        attributes: the attributes of the operator.
        cases: the number of inputs on which both were compared.
        difference: the largest ratio of a difference to the tolerance.
        note: the reason and the effect, if attributes differ from those of the graph.
    """

    mechanism: str
    operator: str
    value: str
    attributes: dict[str, int | float | str]
    cases: int
    difference: float
    note: str = ""


@dataclass(frozen=True)
class NearMiss:
    """A value that was not replaced.

    Attributes:
        mechanism: the mechanism that it resembles.
        value: the name of the value.
        reason: the condition that failed.
    """

    mechanism: str
    value: str
    reason: str


@dataclass
class Recognition:
    """The result of a search in a graph.

    Attributes:
        matches: the rewrites, in the order of the graph.
        near_misses: the values that resemble a mechanism and were not replaced.
        unexamined: the reason why the graph could not be searched, if there is one.
        absence: the reason why there is neither a match nor a near miss.
        unread: the names of values without a formula.
        probed: the values of the original graph, None if no node can be part of a mechanism.
        translated: the recurrent nodes of other domains, which were replaced before the search.
    """

    matches: list[Match] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    unexamined: str = ""
    absence: str = ""
    unread: list[str] = field(default_factory=list)
    probed: ProbedGraph | None = None
    translated: list[Replacement] = field(default_factory=list)

    @property
    def has_changes(self) -> bool:
        """Return whether the graph differs from that of the file."""
        return bool(self.matches or self.translated)
