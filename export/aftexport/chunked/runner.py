"""Runs a document chunk by chunk, in memory that does not grow; see ``aftexport.chunked``."""

import copy
import io
import shutil
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.chunked_plan import DAMAGED
from aftexport.bundle.manifest import ChunkedPlan, ChunkedStage
from aftexport.chunked.spill import Array, Rows, Summaries, Summary
from aftexport.contract import EVIDENCE
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError, InputError, StorageError
from aftexport.system.stored_archives import unstored_member

Parts = Generator[None, None, dict[str, NDArray[np.generic]]]
"""Stops after every part of the work; returns the outputs."""
_Chunk = tuple[int, int]
"""Its first token and the one after its last."""

_MAX_GRAPH_BYTES = 1 << 31
"""Of a protobuf message."""
MEMORY_BUDGET = 512 << 20
"""Bytes a document may take beside the model."""
_MOST_TOKENS = 8192
"""Of a chunk: longer ones are no faster, and others wait for one."""


@dataclass(frozen=True)
class _Document:
    """A document's ids, int64 ``[T]``, and what is kept of each of its tokens."""

    ids: NDArray[np.int64]
    kept: Mapping[str, Rows]

    def inputs(self, engine: OnnxRuntimeEngine, start: int, end: int) -> dict[str, Array]:
        """What an engine takes of the tokens from ``start`` to ``end``."""
        given: dict[str, Array] = {}
        for name in engine.input_names:
            if name == "input_ids":
                given[name] = self.ids[None, start:end]
            elif name == "lengths":
                given[name] = np.array([end - start])
            elif name in self.kept:
                given[name] = self.kept[name].read(start, end)
        return given


class _Others:
    """What each chunk attends to beside its own tokens and those around it.

    Args:
        stage: whose summaries they are.
        merge: one summary of several.
        summaries: where they are written.
    """

    def __init__(
        self,
        stage: ChunkedStage,
        merge: Callable[[Sequence[Summary]], Summary],
        summaries: Summaries,
    ) -> None:
        self._stage = stage
        self._merge = merge
        self._summaries = summaries
        self._chunks: list[int] = []
        self._pieces: list[list[int]] = []

    def add(self, pieces: Sequence[Summary]) -> None:
        """The next chunk: its summaries, cut at the margins of its neighbours."""
        self._pieces.append([self._summaries.append(piece) for piece in pieces])
        self._chunks.append(self._summaries.append(self._merge(pieces)))

    def __iter__(self) -> Iterator[tuple[Array, Array]]:
        """Keys ``[1, S, *]`` and values ``[1, S, D]`` for chunk after chunk."""
        stage, tokens, read = self._stage, self._summaries.tokens, self._summaries.read
        after = self._after()
        before: Summary | None = None  # of what is before the chunk before
        for index, pieces in enumerate(self._pieces):
            start, end = tokens(pieces[0])[0], tokens(pieces[-1])[1]
            near: list[int] = []
            if index > 1:
                chunk = read(self._chunks[index - 2])
                before = chunk if before is None else self._merge([before, chunk])
            if index:
                near += [p for p in self._pieces[index - 1] if tokens(p)[1] <= start - stage.left]
            if not stage.causal and index + 1 < len(self._pieces):
                near += [p for p in self._pieces[index + 1] if tokens(p)[0] >= end + stage.right]
                near += after[index + 2 : index + 3]
            found = [] if before is None else [before]
            found += map(read, near)
            if found:
                yield _joined(found)
            else:
                one = read(pieces[0])
                yield one.keys[:, :0], one.values[:, :0]

    def _after(self) -> list[int]:
        """The summaries of each chunk and all that follow it."""
        # Not all without those before: differences of sums would cancel.
        after: list[int] = []
        following: Summary | None = None
        for place in () if self._stage.causal else reversed(self._chunks):
            chunk = self._summaries.read(place)
            following = chunk if following is None else self._merge([chunk, following])
            after.append(self._summaries.append(following))
        return after[::-1]


def _joined(summaries: Sequence[Summary]) -> tuple[Array, Array]:
    keys = np.concatenate([s.keys for s in summaries], 1)
    return keys, np.concatenate([s.values for s in summaries], 1)


def _cut(chunk: _Chunk, stage: ChunkedStage, chunks: Sequence[_Chunk]) -> list[_Chunk]:
    """A chunk, cut where its neighbours' margins end: what is in those they take as tokens."""
    start, end = chunk
    if len(chunks) == 1:
        return [chunk]
    return list(pairwise(sorted({start, start + stage.right, end - stage.left, end})))


class ChunkedModel:
    """A model that takes one document of any length.

    Args:
        archive: ``chunked.zip``; it is kept open.
        plan: how to run what is in it.
        threads: of one operator; 0 for ``usable_cores``.
        memory_budget: bytes a document may take in memory beside the model.
        folder: where what is kept between layers is written; the system's for temporary
            files by default.
        fused: use the kernel library where it is built.
        chunk_tokens: of a chunk at most; None to choose by the budget.

    Raises:
        EngineError: if ``archive`` is not a zip file, or would take more memory than it has bytes.

    Attributes:
        whole_tokens: a document up to this fits the budget as a whole.
        chunk_tokens: of a chunk at most.
    """

    def __init__(
        self,
        archive: Path,
        plan: ChunkedPlan,
        *,
        threads: int = 0,
        memory_budget: int = MEMORY_BUDGET,
        folder: Path | None = None,
        fused: bool = True,
        chunk_tokens: int | None = None,
    ) -> None:
        self.whole_tokens = max(1, memory_budget // plan.token_bytes)
        # Open from now on: it stays this one where another is put in its place.
        try:
            self._archive = zipfile.ZipFile(archive)
            reason = unstored_member(self._archive, archive.stat().st_size)
        except DAMAGED as error:
            raise EngineError(f"{archive}: {error}.", "Export the model again.") from error
        if reason is not None:
            raise EngineError(f"{archive}: {reason}.", "Export the model again.")
        self._name = archive.name
        self._plan = plan
        self._threads = threads
        self._fused = fused
        self._folder = folder
        around = max((s.left + s.right for s in plan.stages), default=0)
        # Chunks of a document are of like lengths, so that half of one holds both margins.
        self._least_chunk = max(2 * around, 1)
        fitting = min(_MOST_TOKENS, memory_budget // plan.token_bytes - around)
        self.chunk_tokens = max(chunk_tokens or fitting, self._least_chunk)

    def in_chunks_of(self, tokens: int) -> Self:
        """The same model, of the same open archive, with chunks of so many tokens at most."""
        model = copy.copy(self)
        model.chunk_tokens = max(tokens, self._least_chunk)
        return model

    def run(self, ids: NDArray[np.int64], *, evidence: bool = False) -> dict[str, Array]:
        """Runs one document.

        Args:
            ids: int64 ``[T]``.
            evidence: ask for what each token adds, too; where the plan has it.

        Returns:
            ``logits [1, C]`` and, if asked for, ``evidence [1, T]``, as in
            ``aftexport.passes.evidence``.

        Raises:
            InputError: where there are no ids.
            EngineError: where the runtime refuses or fails.
            StorageError: where there is no space for what is kept between layers.
        """
        parts = self.parts(ids, evidence=evidence)
        while True:
            try:
                next(parts)
            except StopIteration as stop:
                return dict(stop.value)

    def parts(self, ids: NDArray[np.int64], *, evidence: bool = False) -> Parts:
        """The same, stopping after every part, so that others can go between.

        To give up, close the generator.
        """
        try:
            return (yield from self._parts(ids, evidence=evidence))
        except OSError as error:
            raise StorageError(
                f"What is left between layers of a document cannot be kept ({error.strerror}).",
                "Shorter documents need no space; make some, or name another folder by --spill.",
            ) from error

    def _parts(self, ids: NDArray[np.int64], *, evidence: bool) -> Parts:
        chunks = self._chunks(ids.size)
        with ExitStack() as files:
            kept: dict[str, Rows] = {}
            for number, stage in enumerate(self._plan.stages):
                document = _Document(ids, kept)
                with ExitStack() as of_stage:
                    summaries = Summaries(self._folder, of_stage)
                    others = yield from self._summarised(number, stage, document, chunks, summaries)
                    kept = yield from self._applied(number, stage, document, chunks, others, files)
            document = _Document(ids, kept)
            outputs = yield from self._pooled(document, chunks)
            found = {"logits": outputs["logits"]}
            if evidence:
                found[EVIDENCE] = yield from self._explained(document, chunks, outputs)
            return found

    def count(self, tokens: int, *, evidence: bool = False) -> int:
        """The parts of a document of so many tokens, the last included."""
        chunks = self._chunks(tokens)
        parts = len(self._pooled_from(chunks)) + len(chunks) * evidence + 1
        for number, stage in enumerate(self._plan.stages):
            parts += sum(len(_cut(chunk, stage, chunks)) for chunk in chunks)
            parts += len(self._applied_to(number, chunks))
        return parts

    def _chunks(self, tokens: int) -> list[_Chunk]:
        if not tokens:
            raise InputError("The document has no tokens.", "Give some ids.")
        count = -(-tokens // self.chunk_tokens)
        ends = [tokens * i // count for i in range(count + 1)]
        return list(pairwise(ends))

    def _summarised(
        self,
        number: int,
        stage: ChunkedStage,
        document: _Document,
        chunks: Sequence[_Chunk],
        summaries: Summaries,
    ) -> Generator[None, None, _Others]:
        reduce, merge = self._engine(f"{number}.reduce"), self._engine(f"{number}.merge")

        def merged(summaries: Sequence[Summary]) -> Summary:
            if len(summaries) == 1:
                return summaries[0]
            keys, values = _joined(summaries)
            few = merge.run({"key": keys, "value": values})
            return Summary.of(few, summaries[0].start, summaries[-1].end)

        others = _Others(stage, merged, summaries)
        for chunk in chunks:
            found = []
            for first, last in _cut(chunk, stage, chunks):
                few = reduce.run(document.inputs(reduce, first, last))
                found.append(Summary.of(few, first, last))
                yield
            others.add(found)
        return others

    def _applied(
        self,
        number: int,
        stage: ChunkedStage,
        document: _Document,
        chunks: Sequence[_Chunk],
        others: _Others,
        files: ExitStack,
    ) -> Generator[None, None, dict[str, Rows]]:
        apply = self._engine(f"{number}.apply")
        kept: dict[str, Rows] = {}
        applied_to = self._applied_to(number, chunks)
        for (start, end), (keys, values) in zip(applied_to, others, strict=False):
            low, high = max(start - stage.left, 0), min(end + stage.right, document.ids.size)
            inputs = document.inputs(apply, low, high)
            outputs = apply.run({**inputs, "other_keys": keys, "other_values": values})
            for name, rows in outputs.items():
                if name not in kept:
                    kept[name] = Rows(self._folder)
                    files.enter_context(kept[name].file)
                kept[name].append(rows[:, start - low : end - low])
            yield
        for name, old in document.kept.items():
            if name in stage.keeps:
                kept[name] = old
            else:
                old.file.close()
        return kept

    def _pooled(self, document: _Document, chunks: Sequence[_Chunk]) -> Parts:
        pool, head = self._engine("pool"), self._engine("head")
        pooled: dict[str, Array] = {}
        combine = {"sum": np.add, "max": np.maximum}
        for start, end in self._pooled_from(chunks):
            outputs = pool.run(document.inputs(pool, start, end))
            if lacking := self._plan.pooled.keys() - outputs.keys():
                raise EngineError(
                    f"{self._name}: it pools no {min(lacking)}, which the manifest names.",
                    "Export the model again.",
                )
            for name, how in self._plan.pooled.items():
                if name not in pooled:
                    pooled[name] = outputs[name]
                elif how != "first":
                    pooled[name] = combine[how](pooled[name], outputs[name])
            yield
        whole = document.inputs(head, 0, document.ids.size)
        return head.run({**whole, **pooled})

    def _explained(
        self, document: _Document, chunks: Sequence[_Chunk], outputs: Mapping[str, Array]
    ) -> Generator[None, None, Array]:
        explain = self._engine("explain")
        added = []
        for start, end in chunks:
            inputs = document.inputs(explain, start, end)
            inputs |= {name: outputs[name] for name in explain.input_names if name in outputs}
            added.append(explain.run(inputs)[EVIDENCE].copy())
            yield
        return np.concatenate(added, 1)

    def _applied_to(self, number: int, chunks: Sequence[_Chunk]) -> Sequence[_Chunk]:
        """The chunks whose rows are needed after a stage."""
        last = number + 1 == len(self._plan.stages)
        return self._pooled_from(chunks) if last else chunks

    def _pooled_from(self, chunks: Sequence[_Chunk]) -> Sequence[_Chunk]:
        """The first alone, where nothing but the first token's row is pooled."""
        first_alone = all(how == "first" for how in self._plan.pooled.values())
        return chunks[:1] if first_alone else chunks

    def _engine(self, name: str) -> OnnxRuntimeEngine:
        # Made when its turn comes: not more than a layer's weights are there twice, and what it
        # keeps between chunks goes with it.
        try:
            model = self._read(name)
        except (OSError, KeyError, *DAMAGED) as error:
            raise EngineError(
                f"{self._name}: {str(error) or 'it is cut off'}.",
                "Replace a bundle, never write over it.",
            ) from error
        return OnnxRuntimeEngine(model, threads=self._threads, fused=self._fused)

    def _read(self, name: str) -> bytes:
        """A graph with the weights that it shares; see ``aftexport.chunked.archive``."""
        shared = (
            member
            for member in self._archive.namelist()
            if "+" in member and name in member.removesuffix(".onnx").split("+")
        )
        members = [f"{name}.onnx", *shared]
        size = sum(self._archive.getinfo(m).file_size for m in members)
        if size > _MAX_GRAPH_BYTES:
            raise zipfile.BadZipFile(f"{name} has {size} bytes, more than {_MAX_GRAPH_BYTES}")
        # Of that size from the start, its value is no second copy.
        model = io.BytesIO(bytes(size))
        for member in members:
            with self._archive.open(member) as part:
                shutil.copyfileobj(part, model, 1 << 20)
        return model.getvalue()
