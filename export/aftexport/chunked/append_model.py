"""Append tokens to a document at the cost of the new tokens; see ``AppendModel``."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.manifest import ChunkedPlan
from aftexport.chunked.append_plan import AppendStage, append_plan
from aftexport.chunked.document import FIRST_POSITION, LEFT_STATE, NEXT_STATE
from aftexport.chunked.document_state import (
    DocumentState,
    Level,
    StageState,
    TokenDigest,
    with_summary,
)
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.spill import Array
from aftexport.chunked.stage_runs import combine_pooled, joined
from aftexport.chunked.state_bytes import StateReader
from aftexport.system.contract import FEATURES, IDS, LENGTHS

Values = dict[str, Array]
"""Values per token by name, ``[1, n, *]``."""
_CHUNK_TOKENS = 8192
"""The maximum number of tokens that run at once."""
_FIRST_TOKEN = slice(0, 1)
_NO_TOKENS = StageState()


class AppendModel:
    """A causal model that appends tokens to documents.

    Its graphs are those of ``chunked.zip``. ``ChunkedModel`` runs all chunks of a document through
    one layer after the other; this model runs one chunk through all layers, because no layer needs
    later tokens. All graphs stay loaded. Threads may share the model.

    Args:
        archive: the bundle's graphs for documents in chunks.
        plan: the plan of these graphs.
        bundle: the digest of the bundle.
        num_features: the number of features of a token; None for token ids.
        chunk_tokens: the maximum number of tokens that run at once.

    Raises:
        NotAppendable: if the model cannot append tokens; gives the reason.
        EngineError: if a graph is missing or damaged, or the runtime refuses it.

    Attributes:
        reader: the reader of saved states.
    """

    def __init__(
        self,
        archive: OpenedArchive,
        plan: ChunkedPlan,
        bundle: str,
        *,
        num_features: int | None = None,
        chunk_tokens: int = _CHUNK_TOKENS,
    ) -> None:
        self._plan = append_plan(archive, plan, IDS if num_features is None else FEATURES)
        self._bundle = bundle
        self._chunk_tokens = chunk_tokens
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
        self.reader = StateReader(
            self._advanced(None, token)[0],
            unsummarized=tuple(s.left if s.causal else 1 for s in self._plan.stages),
            levels=tuple(
                None
                if stage.state is not None
                else self._reduced(number, {name: values[name] for name in stage.reads})
                for number, stage in enumerate(self._plan.stages)
            ),
        )

    def append(
        self, state: DocumentState | None, tokens: NDArray[Any]
    ) -> tuple[dict[str, Array], DocumentState]:
        """Return the outputs of a document with further tokens, and its state.

        Args:
            state: the state of the document before them, of this bundle; None for a new document.
            tokens: at least one token id, int64 ``[n]``, or normalized features, float32
                ``[n, F]``.

        Returns:
            By name, each output per document ``[1, width]``, and each output per token for the
            new tokens ``[1, n, width]``; and the state of the longer document.

        Raises:
            EngineError: if a graph fails.
        """
        rows: dict[str, list[Array]] = {name: [] for name in self._widths}
        for start in range(0, len(tokens), self._chunk_tokens):
            chunk = tokens[start : start + self._chunk_tokens]
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

    def _graph_names(self) -> list[str]:
        names = []
        for number, stage in enumerate(self._plan.stages):
            parts = ("reduce", "merge", "apply") if stage.state is None else ("apply",)
            names += [f"{number}.{part}" for part in parts]
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
            pooling = self._plan.pooled[name]
            # The sum of many tokens in float32 would lose the digits of one.
            new = new.astype(np.float64) if pooling == "sum" else new.copy()
            if state is not None:
                new = combine_pooled(pooling, state.pooled[name], new)
            pooled[name] = new
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
        """Return the sums and maxima over the tokens from ``start`` on."""
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
