"""Append tokens to a document at the cost of the new tokens; see ``AppendModel``."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from aftexport.bundle.manifest import ChunkedPlan, KeptKeys, Pooling
from aftexport.chunked.document import (
    ATTENDED,
    FIRST_POSITION,
    KEY,
    LEFT_STATE,
    LOG_SUM,
    NEXT_STATE,
    QUERY,
    QUERY_START,
    VALUE,
    Array,
    Level,
)
from aftexport.chunked.document_state import (
    DocumentState,
    StageState,
    StateReader,
    TokenDigest,
    with_summary,
)
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.stage_runs import combine_pooled, joined, key_blocks, merged
from aftexport.errors import EngineError
from aftexport.system.contract import EXPLAINED, FEATURES, IDS, LENGTHS

_SUMMARIES = ("other_keys", "other_values")
_SUMMARY = ("few_keys", "few_values")
_GIVEN = frozenset((LENGTHS, EXPLAINED, FIRST_POSITION))
"""The inputs of graphs that every run has."""


class NotAppendable(Exception):  # noqa: N818 (an outcome, not an error)
    """The reason why a model cannot append tokens to a document, as its message."""


@dataclass(frozen=True)
class AppendStage:
    """One attention, recurrence or convolution of a model that appends tokens."""

    # the shape of the state of a recurrence or convolution; None for an attention, which has
    # summaries
    state: tuple[int, ...] | None
    # Another attention is applied to the first token only, whose result alone is pooled.
    causal: bool
    left: int  # the number of earlier tokens whose values are kept as they are
    keys: KeptKeys | None  # those of a softmax attention; None for another stage
    reads: tuple[str, ...]  # the names of the values per token that its graphs read


@dataclass(frozen=True)
class AppendPlan:
    """The values that each graph reads when tokens are appended."""

    main: str  # the input with the tokens
    stages: tuple[AppendStage, ...]
    first: tuple[str, ...]  # the names of the values that are kept of the first token
    pooled: Mapping[str, Pooling]
    # results for the first token that the graph of sums and maxima also reads
    fillers: tuple[str, ...]

    @property
    def runs_pool_on_first(self) -> bool:
        """Whether some pooled values are those of the first token."""
        return "first" in self.pooled.values()

    @property
    def running(self) -> tuple[str, ...]:
        """The pooled values that later tokens change: all but those of the first token."""
        return tuple(name for name, how in self.pooled.items() if how != "first")


def append_plan(archive: OpenedArchive, plan: ChunkedPlan, main: str) -> AppendPlan:
    """Return the plan for appended tokens of a model with the input ``main``.

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
        is_summarized = recurrence is None and stage.keys is None
        if not stage.causal and (stage.left or stage.right or not is_summarized):
            raise self._not_causal(number)
        if stage.keys is not None:
            reduced = self._known(f"{number}.project", outputs=(QUERY, KEY, VALUE))
            applied = self._known(f"{number}.apply", (ATTENDED, LOG_SUM))
            self._graph(f"{number}.attend", (ATTENDED, LOG_SUM))
        elif recurrence is None:
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
            stage.keys,
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
        """Return the values that a graph reads beside ``given``, which must be known."""
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


Values = dict[str, Array]
"""Values per token by name, ``[1, n, *]``."""
_FIRST_TOKEN = slice(0, 1)
_NO_TOKENS = StageState()


class AppendModel:
    """A causal model that appends tokens to documents, from the graphs of ``chunked.zip``.

    Raises:
        NotAppendable: if the model cannot append tokens; gives the reason.
        EngineError: if a graph is missing or damaged, or the runtime refuses it.
    """

    max_run_tokens = 8192
    """The maximum number of tokens that run at once."""

    def __init__(
        self,
        archive: OpenedArchive,
        plan: ChunkedPlan,
        bundle: str,
        *,
        num_features: int | None = None,
    ) -> None:
        self._plan = append_plan(archive, plan, IDS if num_features is None else FEATURES)
        self._bundle = bundle
        self._documents = plan.documents
        self._widths = plan.tokens
        self._engines = {name: archive.engine(name) for name in self._graph_names()}
        self._empty: dict[int, Level] = {}
        token: NDArray[Any] = np.zeros(1, np.int64)
        if num_features is not None:
            token = np.zeros((1, num_features), np.float32)
        stages, first, values = self._attended(None, token)
        fillers = self._late(first, stages)
        self._filler = {name: fillers[name] for name in self._plan.fillers}
        self._types = {name: rows.dtype for name, rows in self._pooled(values, 0).items()}
        self._max_tokens = plan.max_state_tokens
        self.reader = StateReader(
            self._advanced(None, token)[0],
            unsummarized=tuple(self._unsummarized(stage) for stage in self._plan.stages),
            levels=tuple(
                None
                if stage.state is not None or stage.keys is not None
                else self._reduced(number, {name: values[name] for name in stage.reads})
                for number, stage in enumerate(self._plan.stages)
            ),
        )

    def append(
        self, state: DocumentState | None, tokens: NDArray[Any]
    ) -> tuple[dict[str, Array], DocumentState]:
        """Return the outputs of a document with ``tokens [n]`` or ``[n, F]`` more, and its state.

        By name, each output per document is ``[1, width]``, and each output per token ``[1, n,
        width]`` for the new tokens. The state of a new document is None.

        Raises:
            EngineError: if a graph fails.
        """
        rows: dict[str, list[Array]] = {name: [] for name in self._widths}
        for start in range(0, len(tokens), self.max_run_tokens):
            chunk = tokens[start : start + self.max_run_tokens]
            state, values = self._advanced(state, chunk)
            if self._widths:
                outputs = self._run("tokens", values, state.tokens - len(chunk))
                for name in self._widths:
                    rows[name].append(outputs[name])
        assert state is not None  # there is at least one token
        return {
            **self._pooled_outputs(state),
            **{name: np.concatenate(parts, 1) for name, parts in rows.items()},
        }, state

    def _unsummarized(self, stage: AppendStage) -> int:
        """Return the maximum number of tokens of a stage that are not in its summaries."""
        if stage.keys is not None:
            left = stage.keys.window_left
            return self._max_tokens if left is None else left
        return stage.left if stage.causal else 1

    def _graph_names(self) -> list[str]:
        names = []
        for number, stage in enumerate(self._plan.stages):
            before: tuple[str, ...] = ()
            if stage.keys is not None:
                before = ("project", "attend")
            elif stage.state is None:
                before = ("reduce", "merge")
            names += [f"{number}.{part}" for part in (*before, "apply")]
        late = ["pool", "head"] if self._plan.pooled else []
        return [*names, *late, *(["tokens"] if self._widths else [])]

    def _advanced(
        self, state: DocumentState | None, tokens: NDArray[Any]
    ) -> tuple[DocumentState, Values]:
        """Return the state with further tokens, and all values of these tokens."""
        stages, first, values = self._attended(state, tokens)
        start = 0 if state is None else state.tokens
        pooled = self._pooled(values, start)
        for name, new in pooled.items():
            # The sum of many tokens in float32 would lose the digits of one.
            is_sum = self._plan.pooled[name] in ("sum", "logsumexp")
            pooled[name] = new.astype(np.float64) if is_sum else new.copy()
        if state is not None:
            pooled = combine_pooled(self._plan.pooled, state.pooled, pooled)
        digest = TokenDigest() if state is None else state.token_digest
        return DocumentState(
            self._bundle,
            digest.extended(tokens),
            stages,
            MappingProxyType(pooled),
            MappingProxyType(first),
        ), values

    def _attended(
        self, state: DocumentState | None, tokens: NDArray[Any]
    ) -> tuple[tuple[StageState, ...], Values, Values]:
        """Return the stages with further tokens, the first token's values, and those of all."""
        values: Values = {self._plan.main: tokens[None]}
        start = 0 if state is None else state.tokens
        stages = []
        for number, stage in enumerate(self._plan.stages):
            before = _NO_TOKENS if state is None else state.stages[number]
            if stage.state is not None:
                stages.append(self._recurred(number, stage, before, values, start))
            elif stage.keys is not None:
                stages.append(self._attended_to_keys(number, stage.keys, before, values, start))
            elif stage.causal:
                stages.append(self._applied(number, stage, before, values, start))
            else:
                # The attention is applied to the first token, which its summary leaves out.
                skipped = 1 if state is None else 0
                rows = {name: values[name][:, skipped:] for name in stage.reads}
                levels = self._summarized(number, before, rows, start + skipped)
                stages.append(StageState(levels))
        if state is not None:
            return tuple(stages), dict(state.first), values
        first = {name: values[name][:, _FIRST_TOKEN].copy() for name in self._plan.first}
        return tuple(stages), first, values

    def _recurred(
        self, number: int, stage: AppendStage, before: StageState, values: Values, start: int
    ) -> StageState:
        """Add the results of a recurrence or convolution to the values of tokens from ``start``."""
        state = before.recurrence
        if state is None:
            assert stage.state is not None  # the caller checks this
            state = np.zeros((1, *stage.state), np.float32)
        rows = {name: values[name] for name in stage.reads}
        outputs = self._run(f"{number}.apply", rows, start, {LEFT_STATE: state})
        after = outputs.pop(NEXT_STATE).copy()
        values.update(outputs)
        return StageState(recurrence=after)

    def _attended_to_keys(
        self, number: int, keys: KeptKeys, before: StageState, values: Values, start: int
    ) -> StageState:
        """Add the results of a softmax attention to the values of tokens from ``start`` on."""
        new = self._run(f"{number}.project", values, start)
        query, count = new[QUERY], _count_of(values)
        known = {
            name: np.concatenate([before.recent.get(name, new[name][:, :0]), new[name]], 1)
            for name in (KEY, VALUE)
        }
        end = known[KEY].shape[1]
        own = (end - count, end)
        attended: Mapping[str, Array] = {}
        for low, high in key_blocks(keys, own, end, self.max_run_tokens):
            block = {name: rows[:, low:high] for name, rows in known.items()}
            part = {**block, QUERY: query, QUERY_START: np.array([own[0] - low])}
            attended = merged(attended, self._engines[f"{number}.attend"].run(part))
        values.update(self._run(f"{number}.apply", values, start, attended))
        leaving = 0 if keys.window_left is None else max(end - keys.window_left, 0)
        kept = {n: rows[:, leaving:].copy() if leaving else rows for n, rows in known.items()}
        return StageState(recent=MappingProxyType(kept if leaving < end else {}))

    def _applied(
        self, number: int, stage: AppendStage, before: StageState, values: Values, start: int
    ) -> StageState:
        """Add the results of a causal attention to the values of tokens from ``start`` on."""
        rows = {name: values[name] for name in stage.reads}
        recent = _count_of(before.recent)
        if recent:
            rows = {n: np.concatenate([before.recent[n], new], 1) for n, new in rows.items()}
        count = _count_of(rows)
        low = start - recent
        outputs = self._run(f"{number}.apply", rows, low, self._others(number, before, rows))
        values.update({name: array[:, recent:] for name, array in outputs.items()})
        leaving = max(count - stage.left, 0)
        past = {name: array[:, :leaving] for name, array in rows.items()}
        kept = {name: array[:, leaving:].copy() for name, array in rows.items() if stage.left}
        return StageState(self._summarized(number, before, past, low), MappingProxyType(kept))

    def _others(self, number: int, before: StageState, rows: Mapping[str, Array]) -> Values:
        """Return the keys and values of a stage's summaries; ``rows`` has at least one token."""
        levels = before.summaries
        if not levels and number not in self._empty:
            one = self._reduced(number, {name: row[:, _FIRST_TOKEN] for name, row in rows.items()})
            self._empty[number] = Level(0, one.keys[:, :0], one.values[:, :0])
        keys, values = joined(levels or [self._empty[number]])
        return {"other_keys": keys, "other_values": values}

    def _summarized(
        self, number: int, before: StageState, rows: Mapping[str, Array], start: int
    ) -> tuple[Level | None, ...]:
        """Return the summaries of a stage with the tokens from ``start`` on."""
        if not _count_of(rows):
            return before.levels
        return with_summary(
            before.levels,
            self._reduced(number, rows, start),
            lambda first, second: self._merged(number, [first, second]),
        )

    def _reduced(self, number: int, rows: Mapping[str, Array], start: int = 0) -> Level:
        few = self._run(f"{number}.reduce", rows, start)
        return Level(_count_of(rows), few["few_keys"].copy(), few["few_values"].copy())

    def _merged(self, number: int, levels: Sequence[Level]) -> Level:
        keys, values = joined(levels)
        few = self._engines[f"{number}.merge"].run({"key": keys, "value": values})
        count = sum(level.tokens for level in levels)
        return Level(count, few["few_keys"].copy(), few["few_values"].copy())

    def _pooled(self, values: Values, start: int) -> Values:
        """Return the values pooled from the tokens from ``start`` on, but for the first one's."""
        if not self._plan.running:
            return {}
        # No sum or maximum depends on the filler; see append_plan.
        count = _count_of(values)
        filler = {name: np.repeat(row, count, 1) for name, row in self._filler.items()}
        outputs = self._run("pool", {**values, **filler}, start)
        return {name: outputs[name] for name in self._plan.running}

    def _late(self, first: Values, stages: Sequence[StageState]) -> Values:
        """Return the values of the first token, with the results of attentions to all tokens."""
        values = dict(first)
        for number, stage in enumerate(self._plan.stages):
            if not stage.causal:
                others = self._others(number, stages[number], values)
                values.update(self._run(f"{number}.apply", values, 0, others))
        return values

    def _pooled_outputs(self, state: DocumentState) -> Values:
        """Return the outputs per document."""
        if not self._documents:
            return {}
        pooled = {name: array.astype(self._types[name]) for name, array in state.pooled.items()}
        if self._plan.runs_pool_on_first:
            outputs = self._run("pool", self._late(dict(state.first), state.stages), 0)
            firsts = self._plan.pooled.keys() - pooled.keys()
            pooled.update({name: outputs[name] for name in firsts})
        outputs = self._run("head", pooled, 0, {LENGTHS: np.array([state.tokens])})
        return {name: outputs[name] for name in self._documents}

    def _run(
        self,
        graph: str,
        values: Mapping[str, Array],
        start: int,
        late: Mapping[str, Array] = MappingProxyType({}),
    ) -> Values:
        """Run a graph on the values that it reads of the tokens from ``start`` on."""
        engine = self._engines[graph]
        count = np.array([_count_of(values)])
        known = {**values, LENGTHS: count, FIRST_POSITION: np.array([start]), **late}
        return engine.run({name: known[name] for name in engine.input_names})


def _count_of(rows: Mapping[str, Array]) -> int:
    return next((array.shape[1] for array in rows.values()), 0)
