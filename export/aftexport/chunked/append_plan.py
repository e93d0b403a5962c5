"""Check that a bundle can append tokens to a document, and the values that this needs."""

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

import onnx

from aftexport.bundle.manifest import ChunkedPlan, Pooling
from aftexport.chunked.document import FIRST_POSITION, LEFT_STATE, NEXT_STATE
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.errors import EngineError
from aftexport.system.contract import EXPLAINED, LENGTHS

_SUMMARIES = ("other_keys", "other_values")
_SUMMARY = ("few_keys", "few_values")
_GIVEN = frozenset((LENGTHS, EXPLAINED, FIRST_POSITION))
"""The inputs of graphs that every run has."""


class NotAppendable(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a model cannot append tokens to a document, as its message."""


@dataclass(frozen=True)
class AppendStage:
    """One attention, recurrence or convolution of a model that appends tokens.

    Attributes:
        state: the shape of the state of a recurrence or convolution; None for an attention, which
            has summaries.
        causal: whether a token attends only to itself and earlier tokens. Another attention is
            applied to the first token only, whose result alone is pooled.
        left: the number of earlier tokens whose values are kept as they are.
        reads: the names of the values per token that its graphs read.
    """

    state: tuple[int, ...] | None
    causal: bool
    left: int
    reads: tuple[str, ...]


@dataclass(frozen=True)
class AppendPlan:
    """The values that each graph reads when tokens are appended.

    Attributes:
        main: the input with the tokens.
        stages: the stages in their order.
        first: the names of the values that are kept of the first token.
        pooled: the plan's pooled values; see ``ChunkedPlan``.
        fillers: the results for the first token that the graph of sums and maxima also reads.
    """

    main: str
    stages: tuple[AppendStage, ...]
    first: tuple[str, ...]
    pooled: Mapping[str, Pooling]
    fillers: tuple[str, ...]

    @property
    def runs_pool_on_first(self) -> bool:
        """Whether some pooled values are those of the first token."""
        return "first" in self.pooled.values()

    @property
    def running(self) -> tuple[str, ...]:
        """The pooled values that all tokens change: sums and maxima."""
        return tuple(name for name, how in self.pooled.items() if how != "first")


def append_plan(archive: OpenedArchive, plan: ChunkedPlan, main: str) -> AppendPlan:
    """Return the plan for appended tokens.

    Args:
        archive: the graphs of a model for documents in chunks.
        plan: the plan of these graphs.
        main: the input with the tokens.

    Raises:
        NotAppendable: if the model cannot append tokens; gives the reason.
        EngineError: if a graph is missing or damaged.
    """
    return _Planner(archive, plan, main).plan()


class _Planner:
    """The values of a plan's graphs: those of all tokens, and those of the first token only."""

    def __init__(self, archive: OpenedArchive, plan: ChunkedPlan, main: str) -> None:
        self._plan = plan
        self._archive = archive
        self._main = main
        self._of_all = {main}
        self._of_first: set[str] = set()
        self._graphs: dict[str, onnx.GraphProto] = {}

    def plan(self) -> AppendPlan:
        stages = tuple(map(self._stage, range(len(self._plan.stages))))
        pooling = self._pooling()
        self._check_head()
        self._check_tokens()
        reads = set[str]().union(*(stage.reads for stage in stages if not stage.causal))
        if "first" in self._plan.pooled.values():
            reads |= pooling
        return AppendPlan(
            self._main,
            stages,
            first=tuple(sorted(reads & self._of_all)),
            pooled=self._plan.pooled,
            fillers=tuple(sorted(pooling & self._of_first)),
        )

    def _stage(self, number: int) -> AppendStage:
        stage = self._plan.stages[number]
        recurrence = stage.recurrence
        if not stage.causal and (stage.left or stage.right or recurrence is not None):
            raise self._not_causal(number)
        if recurrence is None:
            reduced = self._known(f"{number}.reduce", outputs=_SUMMARY)
            applied = self._known(f"{number}.apply", _SUMMARIES)
        else:
            reduced = frozenset()
            applied = self._known(f"{number}.apply", (LEFT_STATE,), (NEXT_STATE,))
        self._check_causal(reduced | applied if stage.causal else reduced)
        results = {value.name for value in self._graph(f"{number}.apply").output}
        (self._of_all if stage.causal else self._of_first).update(results - {NEXT_STATE})
        return AppendStage(
            None if recurrence is None else recurrence.shape,
            stage.causal,
            stage.left,
            tuple(sorted(reduced | applied)),
        )

    def _pooling(self) -> Set[str]:
        """Return the values that the graph of pooled values reads."""
        if not self._plan.pooled:
            return frozenset()
        graph = self._graph("pool", self._plan.pooled)
        for name, how in self._plan.pooled.items():
            if how != "first":
                self._check_causal(_sources(graph, name))
        return self._known("pool")

    def _check_head(self) -> None:
        if not self._plan.pooled:
            return
        self._graph("head", self._plan.documents)
        if others := self._reads("head") - self._plan.pooled.keys():
            raise NotAppendable(f"its last part reads {min(others)} of the tokens")

    def _check_tokens(self) -> None:
        if not self._plan.tokens:
            return
        self._graph("tokens", self._plan.tokens)
        reads = self._reads("tokens")
        self._check_causal(reads)
        if others := reads - self._of_all:
            raise NotAppendable(
                "the outputs of earlier tokens depend on later tokens, through the pooled value "
                f"{min(others)}"
            )

    def _check_causal(self, names: Iterable[str]) -> None:
        """Raise NotAppendable if a value is known for the first token only."""
        if self._of_first.isdisjoint(names):
            return
        raise self._not_causal(next(n for n, s in enumerate(self._plan.stages) if not s.causal))

    def _not_causal(self, number: int) -> NotAppendable:
        stages = self._plan.stages
        kind = "attention" if stages[number].recurrence is None else "recurrence"
        return NotAppendable(
            f"it is not causal: its {kind} (stage {number + 1} of {len(stages)}) depends on later "
            "tokens"
        )

    def _known(
        self, graph: str, given: Collection[str] = (), outputs: Collection[str] = ()
    ) -> Set[str]:
        """Return the values that a graph reads beside ``given``, which must be known.

        Raises:
            EngineError: if an input is unknown, or one of ``outputs`` is missing.
        """
        self._graph(graph, outputs)
        reads = self._reads(graph) - set(given)
        if unknown := reads - self._of_all - self._of_first:
            raise _damaged(self._archive, graph, f"an input {min(unknown)}")
        return reads

    def _reads(self, graph: str) -> Set[str]:
        return {value.name for value in self._graph(graph).input} - _GIVEN

    def _graph(self, name: str, outputs: Collection[str] = ()) -> onnx.GraphProto:
        """Return a graph, which must have ``outputs``."""
        if name not in self._graphs:
            self._graphs[name] = self._archive.graph(name)
        graph = self._graphs[name]
        if missing := set(outputs) - {value.name for value in graph.output}:
            raise _damaged(self._archive, name, f"no output {min(missing)}")
        return graph


def _damaged(archive: OpenedArchive, graph: str, problem: str) -> EngineError:
    return EngineError(
        f"{archive.name}: expected {graph} as the manifest describes it, got {problem}.",
        "Export the model again.",
    )


def _sources(graph: onnx.GraphProto, output: str) -> set[str]:
    """Return the names of all values that an output depends on."""
    needed = {output}
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            needed.update(node.input)
    return needed
