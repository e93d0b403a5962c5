"""Live comparison of a bundle with PyTorch, and the reaction to a breach of parity."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, Self

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from aftexport.bundle.golden import Case
from aftexport.errors import EngineError, StorageError
from aftexport.heads import Head, TokenClassification
from aftexport.heads.token_classification import TokenLabels
from aftexport.parity import Comparison, compare, worst
from aftserve.errors import NotFoundError, RefusedError
from aftserve.model.answers import Answer, Decoding
from aftserve.model.documents import TokenizedDocument
from aftserve.model.load import ActiveBundle, load_standard_ops_model
from aftserve.model.reload import BundleLoader
from aftserve.observability.health import ModelHealth
from aftserve.observability.metrics import ModelMetrics
from aftserve.parity.reference import ReferenceProcess
from aftserve.scheduling.batching import Result
from aftserve.scheduling.scheduler import Scheduler
from aftserve.settings import Settings

logger = logging.getLogger("aftserve.parity")


class GoldenCase(BaseModel):
    """A golden case of the bundle, with PyTorch's outputs, run on this machine."""

    case: str
    subject: str = Field(description="model, or the name of a single operator.")
    output: str = Field(description="Name of the compared output.")
    shape: list[int]
    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    bound: float
    score_error: float | None = Field(
        default=None, description="Error of the scores or values that the head makes of it."
    )
    label_flips: int
    passed: bool


class ParityReport(BaseModel):
    """Comparison of the engine with PyTorch's stored outputs."""

    golden: list[GoldenCase]
    within: bool
    reference: bool = Field(description="Whether POST /parity can run PyTorch itself.")
    shadow: float = Field(description="Share of live documents that are also compared.")


class OutputParity(BaseModel):
    """One logit of the engine and of PyTorch."""

    head: str
    label: str
    served: float
    reference: float
    difference: float


class HeadParity(BaseModel):
    """One output of the engine and of PyTorch, as a whole."""

    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    score_error: float | None = Field(
        description="Error of the scores, values or vectors made of it, by the same bound."
    )
    label_flips: int = Field(description="Number of tokens, or of documents, of another label.")
    span_flips: int | None = Field(
        description="Number of spans that only one of both has; null if the head has no spans."
    )
    within: bool


class ParityCheck(BaseModel):
    """Comparison of the engine with PyTorch on one document."""

    tokens: int
    outputs: list[OutputParity] = Field(description="Each logit of the heads for documents.")
    heads: dict[str, HeadParity] = Field(description="Each output as a whole.")
    error: float | Literal["inf"] = Field(
        description="max |output - reference| / max(1, max |reference|)"
    )
    bound: float
    score_error: float | None = Field(
        default=None, description="Error of the scores or values, by the same bound."
    )
    within: bool
    label_flips: int


class BreachHandler:
    """The reaction to breaches of the active bundle, by the setting ``on_breach``."""

    def __init__(
        self, settings: Settings, health: ModelHealth, scheduler: Scheduler, loader: BundleLoader
    ) -> None:
        self._settings = settings
        self._health = health
        self._scheduler = scheduler
        self._loader = loader
        self._fallback: asyncio.Task[None] | None = None
        self._running: set[asyncio.Task[None]] = set()

    def handle(self, active: ActiveBundle, reason: str) -> None:
        """Refuse requests, or begin a fallback; later breaches during a fallback are ignored."""
        if self._settings.on_breach == "unready" or active.model.uses_standard_ops_only:
            self._health.breach = reason
        elif self._fallback is None:
            self._fallback = asyncio.create_task(self._fall_back(active, reason))
            self._running.add(self._fallback)
            self._fallback.add_done_callback(self._running.discard)

    async def wait(self) -> None:
        """Wait for the end of all fallbacks."""
        if self._running:
            await asyncio.wait({*self._running})

    def clear(self) -> None:
        """Forget the breaches of the bundle before: another one is active.

        A fallback of the bundle before goes on, because accepted requests wait for it.
        """
        self._fallback = None
        self._health.breach = None

    async def _fall_back(self, active: ActiveBundle, reason: str) -> None:
        """Continue with standard operators only, if their golden cases are within the bound."""
        with self._scheduler.paused(active):
            model = None
            try:
                async with self._loader.turn:
                    model = await self._loader.run(
                        partial(load_standard_ops_model, active.bundle, self._settings)
                    )
            except Exception:
                logger.exception("the model cannot be loaded with fallbacks only")
            is_active = self._fallback is asyncio.current_task()  # not of a bundle before
            if model is None or model.breach is not None:
                if is_active:
                    self._health.breach = reason
                return
            self._scheduler.forget(active.model)
            active.model = model
            if is_active:
                self._scheduler.measure(model)
                logger.warning("serving with fallbacks only from now on")


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
        reference: ReferenceProcess | None,  # None without a model file
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
