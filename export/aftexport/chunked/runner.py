"""Runs of a document chunk by chunk, in bounded memory; see ``aftexport.chunked``."""

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.manifest import ChunkedPlan, ChunkedStage
from aftexport.chunked.document import (
    Array,
    Document,
    NextValues,
    Rows,
    States,
    Summaries,
    Summary,
    Tokens,
)
from aftexport.chunked.opened_archive import OpenedArchive
from aftexport.chunked.stage_runs import (
    Chunk,
    OtherSummaries,
    RecurrenceRun,
    SoftmaxRun,
    advances,
    combine_pooled,
    cut_at_margins,
    joined,
    key_blocks,
)
from aftexport.engines.onnxruntime import Provider
from aftexport.engines.onnxruntime.sessions import padded_choices
from aftexport.errors import EngineError, InputError, UsageError
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftexport.system.contract import EVIDENCE, EXPLAINED, largest

Parts = Generator[None, None, dict[str, NDArray[np.generic]]]
"""A generator that yields after every part of the work, and returns the outputs."""


def finished(parts: Parts) -> dict[str, NDArray[np.generic]]:
    """Return the outputs after all parts."""
    while True:
        try:
            next(parts)
        except StopIteration as stop:
            return dict(stop.value)


MEMORY_BUDGET = 512 << 20
"""The default maximum bytes of a document in memory, without the model."""


_MAX_CHUNK_TOKENS = 8192
"""The maximum length of a chunk: longer ones are not faster, and delay other documents."""


@dataclass(frozen=True)
class _Request:
    """The requested outputs of a model."""

    documents: Sequence[str]
    tokens: Mapping[str, int]  # each output per token, with its width
    explained: Sequence[int]  # the numbers of the logits with evidence

    @classmethod
    def of(
        cls,
        plan: ChunkedPlan,
        outputs: Collection[str] | None,
        evidence: bool | Sequence[int],
    ) -> Self:
        """Return the request of a call of ``ChunkedModel.run``.

        Raises:
            UsageError: if the plan lacks one of ``outputs``, or the evidence.
        """
        names = plan.output_names if outputs is None else outputs
        if unknown := set(names) - plan.output_names:
            raise UsageError(
                f"Expected outputs among {', '.join(sorted(plan.output_names))}, got "
                f"{min(unknown)}.",
                "Leave it out.",
            )
        explained = [largest(0)] if evidence is True else evidence or ()
        if explained and not plan.evidence:
            raise UsageError(
                "The plan of this model has no evidence for documents in chunks.",
                "Do not request evidence.",
            )
        return cls(
            documents=tuple(name for name in plan.documents if name in names),
            tokens={name: width for name, width in plan.tokens.items() if name in names},
            explained=tuple(explained),
        )


Sink = Callable[[Array], None]
"""A receiver of the rows ``[1, n, width]`` of an output per token, chunk after chunk."""


class TokenOutputs:
    """The outputs per token of one document; ``joined`` has those without a sink.

    Raises:
        UsageError: if a sink is for another output.
    """

    def __init__(self, widths: Mapping[str, int], tokens: int, sinks: Mapping[str, Sink]) -> None:
        if unknown := sinks.keys() - widths.keys():
            raise UsageError(
                f"A sink must be for an output per token ({', '.join(widths) or 'none'}), got one "
                f"for {min(unknown)}.",
                "Remove the sink.",
            )
        self.joined: dict[str, Array] = {}
        self._widths = widths
        self._tokens = tokens
        self._sinks = sinks
        self._next = 0

    def add(self, outputs: Mapping[str, Array], end: int) -> None:
        """Hand over the rows of the next chunk.

        Raises:
            EngineError: if an output is missing or has another shape.
        """
        start, self._next = self._next, end
        for name, width in self._widths.items():
            rows = outputs.get(name)
            if rows is None or rows.shape != (1, end - start, width):
                raise EngineError(
                    f"Expected the output {name} [1, {end - start}, {width}] as in the manifest, "
                    f"got {'none' if rows is None else list(rows.shape)}.",
                    "Export the model again.",
                )
            if name in self._sinks:
                self._sinks[name](rows)
                continue
            if name not in self.joined:
                self.joined[name] = np.empty((1, self._tokens, width), rows.dtype)
            self.joined[name][:, start:end] = rows


class ChunkedModel:
    """A model for one document of any length, from the graphs of ``chunked.zip``.

    ``memory_budget`` bounds the bytes of a document in memory, without the model; ``folder`` takes
    the values between layers. A document of ``whole_tokens`` fits the budget as a whole, and a
    chunk has at most ``chunk_tokens``.

    Raises:
        EngineError: if ``archive`` is not a zip file, or would need more memory than its size.
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
        provider: Provider = "cpu",
        chunk_tokens: int | None = None,
    ) -> None:
        self.whole_tokens = max(1, memory_budget // plan.token_bytes)
        self._archive = OpenedArchive(archive, threads=threads, fused=fused, provider=provider)
        self._plan = plan
        self._folder = folder
        margins = max((s.left + s.right for s in plan.stages), default=0)
        # Chunks of a document have similar lengths, so half of one holds both margins.
        self._min_chunk_tokens = max(2 * margins, 1)
        fitting = min(_MAX_CHUNK_TOKENS, memory_budget // plan.token_bytes - margins)
        self.chunk_tokens = max(chunk_tokens or fitting, self._min_chunk_tokens)

    def in_chunks_of(self, tokens: int) -> Self:
        """Return the same model, of the same open archive, with chunks of at most ``tokens``."""
        model = copy.copy(self)
        model.chunk_tokens = max(tokens, self._min_chunk_tokens)
        return model

    def run(
        self,
        tokens: Tokens,
        extras: ExtraValues = NO_EXTRAS,
        *,
        evidence: bool | Sequence[int] = False,
        sinks: Mapping[str, Sink] | None = None,
        outputs: Collection[str] | None = None,
    ) -> dict[str, Array]:
        """Run one document of ``tokens [T]``, or of normalized features ``[T, F]``.

        ``evidence`` has the numbers of the logits to explain, see ``contract.EXPLAINED``; True for
        the largest logit of the first head. A sink gets every row of an output per token once, in
        order, as soon as it is computed. ``outputs`` has the names of the outputs to return; None
        for all.

        Returns by name each output per document ``[1, width]``, each output per token without a
        sink ``[1, T, width]`` and, if requested, ``evidence [1, chosen * T]``, see
        ``aftexport.lowering.evidence``.

        Raises:
            InputError: if the document has no tokens.
            UsageError: if a sink is for another output, or ``outputs`` has an unknown one.
            EngineError: if the runtime refuses a graph or fails.
            StorageError: if there is not enough space for values between layers.
        """
        return finished(self.parts(tokens, extras, evidence=evidence, sinks=sinks, outputs=outputs))

    def parts(
        self,
        tokens: Tokens,
        extras: ExtraValues = NO_EXTRAS,
        *,
        evidence: bool | Sequence[int] = False,
        sinks: Mapping[str, Sink] | None = None,
        outputs: Collection[str] | None = None,
    ) -> Parts:
        """Run one document as ``run``, with a stop after every part; closing it cancels the run."""
        # An exception of a sink ends the run.
        chunks = self._chunks(len(tokens))
        request = _Request.of(self._plan, outputs, evidence)
        rows = TokenOutputs(request.tokens, len(tokens), sinks or {})
        with ExitStack() as files:
            kept: dict[str, Rows] = {}
            for number, stage in enumerate(self._plan.stages):
                document = Document(tokens, extras, kept)
                applied_to = self._applied_to(number, chunks, request)
                values_after = NextValues(self._folder, files)
                with ExitStack() as stage_files:
                    yield from self._staged(
                        number, document, chunks, applied_to, values_after, stage_files
                    )
                kept = values_after.with_earlier(document, stage.keeps)
            document = Document(tokens, extras, kept)
            late = (yield from self._pooled(document, chunks, request)) if self._plan.pooled else {}
            results = {name: late[name] for name in request.documents}
            if request.tokens:
                yield from self._by_token(document, chunks, late, rows)
                results |= rows.joined
            if request.explained:
                results[EVIDENCE] = yield from self._explained(document, chunks, late)
            return results

    def count(
        self,
        tokens: int,
        *,
        evidence: bool | Sequence[int] = False,
        outputs: Collection[str] | None = None,
    ) -> int:
        """Return the number of parts of a document of ``tokens`` tokens, with the last one."""
        chunks = self._chunks(tokens)
        request = _Request.of(self._plan, outputs, evidence)
        passes = bool(request.tokens) + bool(request.explained)
        parts = len(self._pooled_from(chunks)) + len(chunks) * passes + 1
        for number, stage in enumerate(self._plan.stages):
            applied_to = self._applied_to(number, chunks, request)
            if stage.recurrence is not None:
                parts += len(advances(stage.recurrence, chunks))
            elif stage.keys is not None:
                parts += len(chunks) + sum(
                    len(key_blocks(stage.keys, chunk, tokens, self.chunk_tokens))
                    for chunk in applied_to
                )
            else:
                parts += sum(len(cut_at_margins(chunk, stage, chunks)) for chunk in chunks)
            parts += len(applied_to)
        return parts

    def _staged(
        self,
        number: int,
        document: Document,
        chunks: Sequence[Chunk],
        applied_to: Sequence[Chunk],
        values_after: NextValues,
        files: ExitStack,
    ) -> Generator[None, None, None]:
        """Append the values after a stage, which stores others in ``files``."""
        stage = self._plan.stages[number]
        if stage.recurrence is not None:
            run = RecurrenceRun(self._archive, number, stage.recurrence, document)
            right = States(self._folder, files)
            yield from run.advanced(chunks, right)
            yield from run.applied(applied_to, right, values_after)
        elif stage.keys is not None:
            projected = NextValues(self._folder, files)
            attention = SoftmaxRun(self._archive, number, stage.keys, document, projected)
            yield from attention.projected(chunks)
            yield from attention.applied(applied_to, self.chunk_tokens, values_after)
        else:
            summaries = Summaries(self._folder, files)
            others = yield from self._summarized(number, stage, document, chunks, summaries)
            steps = zip(applied_to, others, strict=False)
            yield from self._applied(number, stage, document, steps, values_after)

    def _chunks(self, tokens: int) -> list[Chunk]:
        if not tokens:
            raise InputError("The document has no tokens.", "Give at least one token.")
        count = -(-tokens // self.chunk_tokens)
        ends = [tokens * i // count for i in range(count + 1)]
        return list(pairwise(ends))

    def _summarized(
        self,
        number: int,
        stage: ChunkedStage,
        document: Document,
        chunks: Sequence[Chunk],
        summaries: Summaries,
    ) -> Generator[None, None, OtherSummaries]:
        reduce, merge = (
            self._archive.engine(f"{number}.reduce"),
            self._archive.engine(f"{number}.merge"),
        )

        def merged(summaries: Sequence[Summary]) -> Summary:
            if len(summaries) == 1:
                return summaries[0]
            keys, values = joined(summaries)
            few = merge.run({"key": keys, "value": values})
            return Summary.of(few, summaries[0].start, summaries[-1].end)

        others = OtherSummaries(stage, merged, summaries)
        for chunk in chunks:
            pieces = []
            for first, last in cut_at_margins(chunk, stage, chunks):
                few = reduce.run(document.inputs(reduce, first, last))
                pieces.append(Summary.of(few, first, last))
                yield
            others.add(pieces)
        return others

    def _applied(
        self,
        number: int,
        stage: ChunkedStage,
        document: Document,
        steps: Iterable[tuple[Chunk, tuple[Array, Array]]],
        values_after: NextValues,
    ) -> Generator[None, None, None]:
        apply = self._archive.engine(f"{number}.apply")
        for (start, end), (keys, values) in steps:
            low, high = max(start - stage.left, 0), min(end + stage.right, len(document.tokens))
            inputs = document.inputs(apply, low, high)
            outputs = apply.run({**inputs, "other_keys": keys, "other_values": values})
            values_after.append(outputs, slice(start - low, end - low))
            yield

    def _pooled(self, document: Document, chunks: Sequence[Chunk], request: _Request) -> Parts:
        pool, head = self._archive.engine("pool"), self._archive.engine("head")
        pooled: dict[str, Array] = {}
        for start, end in self._pooled_from(chunks):
            outputs = pool.run(document.inputs(pool, start, end))
            self._check_names(self._plan.pooled.keys(), outputs, "a pooled")
            new = {name: outputs[name] for name in self._plan.pooled}
            pooled = combine_pooled(self._plan.pooled, pooled, new) if pooled else new
            yield
        whole = document.inputs(head, 0, len(document.tokens), pooled)
        if head.takes_choice:
            whole[EXPLAINED] = padded_choices([request.explained])
        outputs = head.run(whole)
        self._check_names(set(self._plan.documents), outputs, "the output")
        return outputs

    def _check_names(self, names: Set[str], outputs: Mapping[str, Array], description: str) -> None:
        if lacking := names - outputs.keys():
            raise EngineError(
                f"{self._archive.name}: expected {description} {min(lacking)} as in the manifest, "
                "got none.",
                "Export the model again.",
            )

    def _by_token(
        self,
        document: Document,
        chunks: Sequence[Chunk],
        late: Mapping[str, Array],
        rows: TokenOutputs,
    ) -> Generator[None, None, None]:
        tokens = self._archive.engine("tokens")
        for start, end in chunks:
            rows.add(tokens.run(document.inputs(tokens, start, end, late)), end)
            yield

    def _explained(
        self, document: Document, chunks: Sequence[Chunk], late: Mapping[str, Array]
    ) -> Generator[None, None, Array]:
        explain = self._archive.engine("explain")
        added = []
        for start, end in chunks:
            outputs = explain.run(document.inputs(explain, start, end, late))
            added.append(outputs[EVIDENCE].reshape(-1, end - start).copy())
            yield
        return np.concatenate(added, 1).reshape(1, -1)

    def _applied_to(
        self, number: int, chunks: Sequence[Chunk], request: _Request
    ) -> Sequence[Chunk]:
        """Return the chunks whose rows are needed after a stage."""
        is_last = number + 1 == len(self._plan.stages)
        needs_all = not is_last or (self._plan.tokens_use_last_stage and request.tokens)
        return chunks if needs_all else self._pooled_from(chunks)

    def _pooled_from(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Return the chunks with pooled rows: only the first if only its first token is pooled."""
        if not self._plan.pooled:
            return ()
        is_first_only = all(how == "first" for how in self._plan.pooled.values())
        return chunks[:1] if is_first_only else chunks
