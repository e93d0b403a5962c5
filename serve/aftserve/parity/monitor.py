"""Comparison of the server's outputs with PyTorch's: at start, on demand, and on live traffic."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.golden import Case
from aftexport.errors import EngineError, StorageError
from aftexport.heads import Head, TokenClassification
from aftexport.heads.token_classification import TokenLabels
from aftexport.parity import Comparison, compare, worst
from aftserve.errors import NotFoundError, RefusedError
from aftserve.model.answers import Answer, Decoding
from aftserve.model.inputs import TokenizedDocument
from aftserve.model.load import ActiveBundle
from aftserve.observability.model_metrics import ModelMetrics
from aftserve.parity.reference import ReferenceProcess
from aftserve.parity.schemas import GoldenCase, HeadParity, OutputParity, ParityCheck, ParityReport
from aftserve.scheduling.batching import Result

logger = logging.getLogger("aftserve.parity")

Outputs = Mapping[str, NDArray[Any]]
"""The logits ``[width]`` of each output of a document, or the rows ``[T, width]`` of its tokens."""
_MAX_PENDING = 4
_MAX_SAMPLED_TOKENS = 1 << 16
"""Maximum length of a sampled document: PyTorch in float64 takes minutes and gigabytes for more."""
Spans = set[tuple[int, int, int]]


class ParityMonitor:
    """Compares a bundle's outputs with PyTorch's, and reports errors out of bound."""

    def __init__(
        self,
        active: ActiveBundle,
        reference: ReferenceProcess | None,  # None if there is no model file
        *,
        share: float,  # of live documents that are sampled
        # Runs a document without others.
        run_single: Callable[[ActiveBundle, TokenizedDocument], Awaitable[Result]],
        seconds: float,  # maximum time of a sampled check
        on_breach: Callable[[ActiveBundle, str], None],
        metrics: ModelMetrics,
    ) -> None:
        self.active = active
        self._reference = reference
        self._share = share
        self._run_single = run_single
        self._seconds = seconds
        self._on_breach = on_breach
        self._metrics = metrics
        self._pending: set[asyncio.Task[None]] = set()
        self._holders = 0
        self._retired = False

    def report(self) -> ParityReport:
        """Return the results of the golden cases."""
        golden = self.active.model.golden
        return ParityReport(
            golden=[GoldenCase.model_validate(result.to_dict()) for result in golden],
            within=all(result.passed for result in golden),
            reference=self._reference is not None,
            shadow=self._share,
        )

    async def check(self, one: TokenizedDocument, answer: Answer) -> ParityCheck:
        """Compare a document's outputs with PyTorch's.

        Raises:
            NotFoundError: if there is no PyTorch model.
            ReferenceError: if PyTorch fails.
        """
        # answer: with the rows of its tokens
        if self._reference is None:
            raise NotFoundError(
                "The server has no PyTorch model to compare with.",
                "Start it with --reference and the model file that the bundle was exported from.",
            )
        outputs, expected = answer.outputs, await self._reference.outputs(one.used, one.extras)
        results = await self._judge("reference", one, outputs, expected)
        heads = self.active.bundle.manifest.heads
        flips = await anyio.to_thread.run_sync(
            count_span_flips, heads, outputs, expected, one.decoding
        )
        numbers = [
            OutputParity(
                head=name, label=label, served=ours, reference=theirs, difference=abs(ours - theirs)
            )
            for name, head in heads.items()
            if not head.is_per_token
            for label, ours, theirs in zip(
                head.logit_names, outputs[name].tolist(), expected[name].tolist(), strict=True
            )
        ]
        furthest = worst(results)
        by_output = {result.output: _head_parity(result, flips) for result in results}
        return ParityCheck(
            tokens=len(one.used),
            outputs=numbers,
            heads=by_output,
            error=by_output[furthest.output].error,
            bound=furthest.bound,
            score_error=furthest.score_error,
            within=furthest.passed,
            label_flips=sum(result.label_flips for result in results),
        )

    def draw(self, one: TokenizedDocument) -> Decoding:
        """Return the decoding of a document; it keeps the rows if its answer is to be sampled."""
        if self.active.model.classifier.in_chunks(len(one.used)):  # PyTorch has no chunks
            return one.decoding
        if random.random() >= self._share:
            return one.decoding
        # A request for other outputs may have no words for a head that needs them.
        lacks_words = self.active.model.classifier.needs_words and one.marks is None
        if len(one.used) > _MAX_SAMPLED_TOKENS or lacks_words:
            self._metrics.skipped_checks.inc()
            return one.decoding
        return one.decoding.with_rows()

    def sample(self, one: TokenizedDocument, result: Result) -> None:
        """Check an answered document in the background; its answer has the rows."""
        if len(self._pending) >= _MAX_PENDING:
            self._metrics.skipped_checks.inc()
            return
        task = asyncio.create_task(self._shadow(one, result))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Self]:
        """Keep the reference open within the block."""
        self._holders += 1
        try:
            yield self
        finally:
            self._holders -= 1
            await self._close_if_done()

    async def retire(self) -> None:
        """Close the reference once no request holds it; another bundle answers new requests."""
        self._retired = True
        await self._close_if_done()

    async def _close_if_done(self) -> None:
        if self._retired and not self._holders:
            await self.close()

    async def close(self) -> None:
        """Cancel pending checks and end the reference."""
        for task in self._pending:
            task.cancel()
        if self._reference is not None:
            await self._reference.close()

    async def _shadow(self, one: TokenizedDocument, result: Result) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                if result.batch_documents > 1:
                    single = await self._run_single(self.active, one)
                    outputs, expected = result.answer.outputs, single.answer.outputs
                    await self._judge("batch", one, outputs, expected)
                if self._reference is not None:
                    await self.check(one, result.answer)
        except (RefusedError, EngineError, StorageError, TimeoutError) as error:
            self._metrics.skipped_checks.inc()
            logger.warning("a check of parity was not possible: %s", str(error) or "too slow")

    async def _judge(
        self, kind: str, one: TokenizedDocument, outputs: Outputs, expected: Outputs
    ) -> list[Comparison]:
        wanted = {name: output[None] for name, output in expected.items()}
        manifest = self.active.bundle.manifest
        comparing = partial(
            compare,
            Case(kind, "model", {manifest.main_input: one.used[:][None]}, wanted),
            {name: output[None] for name, output in outputs.items()},
            manifest.precision,
            bound=manifest.tolerance,
            heads=manifest.heads,
        )
        # In a thread: the comparison of the rows of many tokens takes long.
        results = await anyio.to_thread.run_sync(comparing)
        furthest = worst(results)
        self._metrics.parity_error.labels(kind).observe(furthest.largest_error)
        self._metrics.parity_checks.labels(kind, "within" if furthest.passed else "outside").inc()
        if not furthest.passed:
            other = "PyTorch" if kind == "reference" else "its single run"
            place = f" in {furthest.output}" if len(results) > 1 else ""
            self._on_breach(
                self.active,
                f"a document of {len(one.used)} tokens differs by {furthest.largest_error:.1e} "
                f"from {other}{place}, bound {furthest.bound:.0e}",
            )
        return results


def _head_parity(result: Comparison, span_flips: Mapping[str, int]) -> HeadParity:
    """Return the comparison of an output in the form of a response."""
    return HeadParity(
        error=result.error if np.isfinite(result.error) else "inf",
        score_error=result.score_error,
        label_flips=result.label_flips,
        span_flips=span_flips.get(result.output),
        within=result.passed,
    )


def count_span_flips(
    heads: Mapping[str, Head],
    outputs: Mapping[str, NDArray[Any]],
    expected: Mapping[str, NDArray[Any]],
    decoding: Decoding,
) -> dict[str, int]:
    """Return the number of spans that only one of two outputs has, for each head with spans."""
    return {
        name: len(_spans(head, outputs[name], decoding) ^ _spans(head, expected[name], decoding))
        for name, head in heads.items()
        if isinstance(head, TokenClassification) and head.aggregation != "none"
    }


def _spans(head: TokenClassification, rows: NDArray[Any], decoding: Decoding) -> Spans:
    decoder = head.decoder(decoding.starts_word, is_special=decoding.is_special)
    decoder.add(rows)
    result = decoder.finish()
    assert isinstance(result, TokenLabels)  # the decoder is that of this head
    spans = result.spans
    columns = (spans.starts, spans.ends, spans.labels)
    return set(zip(*(column.tolist() for column in columns), strict=True))
