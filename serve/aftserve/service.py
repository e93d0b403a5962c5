"""The parts of the server together: from a request's documents to their answers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from aftexport import __version__
from aftexport.bundle import Bundle
from aftexport.errors import InputError
from aftserve.admission import Admission
from aftserve.batching import Result
from aftserve.classifier import Document, Tokens
from aftserve.errors import DocumentTooLongError, UnavailableError
from aftserve.health import Health
from aftserve.loading import LoadedModel, load_safe_model
from aftserve.metrics import Metrics
from aftserve.parity import Parity
from aftserve.reference_process import ReferenceProcess
from aftserve.scheduler import Scheduler
from aftserve.schemas import (
    Calibration,
    DocumentResult,
    Info,
    Limits,
    ParityCheck,
    Timings,
)
from aftserve.settings import Settings
from aftserve.watchdog import watched_loop

logger = logging.getLogger(__name__)

_TOKENIZER_THREADS = 2
"""One for a long text, one for the shorter ones that come meanwhile."""
_SHORT_CHARACTERS = 512
"""A text up to this is tokenized sooner than a thread is woken."""


class Service:
    """Everything behind the HTTP interface.

    Args:
        bundle: a checked bundle.
        model: of it, loaded.
        settings: of the server.
    """

    def __init__(self, bundle: Bundle, model: LoadedModel, settings: Settings) -> None:
        self.settings = settings
        self.model = model
        self.health = Health()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            model.classifier,
            model.costs,
            self.metrics,
            budget_tokens=settings.budget_tokens,
            stall_seconds=settings.stall_seconds,
        )
        self.parity = Parity(
            bundle.manifest,
            model.golden,
            ReferenceProcess(bundle.path, settings) if settings.reference else None,
            share=settings.shadow,
            alone=self._alone,
            seconds=settings.deadline_seconds,
            on_breach=self._breached,
            metrics=self.metrics,
        )
        self._bundle = bundle
        self._admission = Admission(self.scheduler, settings.max_queue_seconds)
        self._tokenizers = anyio.CapacityLimiter(_TOKENIZER_THREADS)
        self._falling_back: asyncio.Task[None] | None = None
        self.metrics.ready.set_function(lambda: self.health.ready)
        self.metrics.pace.set_function(lambda: self.scheduler.pace.value)
        self.metrics.waiting_documents.set_function(lambda: self.scheduler.waiting_documents)
        self.metrics.running_documents.set_function(lambda: self.scheduler.running_documents)
        self.metrics.backlog_seconds.set_function(lambda: self.scheduler.backlog_seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers requests while the block runs."""
        scheduling = asyncio.create_task(self.scheduler.serve())
        scheduling.add_done_callback(self._scheduler_ended)
        # With the scheduler, whoever still waits gets an error.
        self.health.when_failed(scheduling.cancel)
        self.health.phase = "ready"
        if self.model.breach is not None:
            self._breached(self.model.breach)
        async with watched_loop(self.settings.stall_seconds):
            yield
        await self.parity.close()
        scheduling.cancel()

    def check_open(self) -> None:
        """Refuses a request before it is read.

        Raises:
            UnavailableError: where the server answers none.
            BusyError: where the queue is too long.
        """
        if not self.health.answers:
            raise UnavailableError(f"The server is {self.health.status}.", "Ask another one.", 1)
        self._admission.check_queue()

    async def classify(
        self, documents: Sequence[Document], deadline: float
    ) -> list[DocumentResult]:
        """Answers all documents of a request; cancelled, it leaves nothing in the queue.

        Args:
            documents: of the request, in order.
            deadline: of the client, by ``time.monotonic``.

        Raises:
            InputError: where a document cannot be classified.
            RefusedError: where it cannot be in time.
            EngineError: where the engine fails on one.
        """
        tokenized = [await self._tokens(*numbered) for numbered in enumerate(documents)]
        admitted = time.monotonic()
        tokens = [self.model.classifier.cut(ids) for ids, _ in tokenized]
        predicted, done = await self._run(tokens, deadline)
        results = [
            DocumentResult(
                label=result.answer.label,
                scores=result.answer.scores,
                tokens_total=len(ids),
                tokens_used=len(used),
                truncated=len(used) < len(ids),
                policy=self.settings.long_documents,
                timings=Timings(
                    tokenize_seconds=tokenize_seconds,
                    queue_seconds=result.started - admitted,
                    inference_seconds=result.inference_seconds,
                    predicted_seconds=predicted,
                ),
            )
            for result, used, (ids, tokenize_seconds) in zip(done, tokens, tokenized, strict=True)
        ]
        self._count(results, predicted, time.monotonic() - admitted)
        for ids, result in zip(tokens, done, strict=True):
            if not self.scheduler.in_chunks(len(ids)):  # PyTorch has no chunks
                self.parity.sample(ids, result)
        return results

    async def compare(self, document: Document, deadline: float) -> ParityCheck:
        """Answers a document and compares that with PyTorch; see ``classify``.

        Raises:
            ReferenceError: where there is no PyTorch model, or it fails.
        """
        ids, _ = await self._tokens(0, document)
        if self.scheduler.in_chunks(len(ids)):
            raise DocumentTooLongError(
                f"The document has {len(ids)} tokens; PyTorch takes it whole, which is over the "
                "memory budget.",
                "Send a shorter one.",
            )
        _, (result,) = await self._run([ids], deadline)
        return await self.parity.check(ids, result.answer.logits)

    async def _run(
        self, documents: Sequence[Tokens], deadline: float
    ) -> tuple[float, list[Result]]:
        """What they were predicted to take together, and their results."""
        now = time.monotonic()
        predicted = self._admission.admit([len(ids) for ids in documents], deadline - now)
        futures = [self.scheduler.submit(ids, now + predicted) for ids in documents]
        try:
            return predicted, [await future for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _alone(self, ids: Tokens) -> Result:
        promised = time.monotonic() + self.scheduler.backlog_seconds
        return await self.scheduler.submit(ids, promised, alone=True)

    async def _tokens(self, index: int, document: Document) -> tuple[Tokens, float]:
        """The checked tokens of a document, and the seconds it took to make them of a text."""
        classifier = self.model.classifier
        try:
            if not isinstance(document, str):
                return classifier.check(document), 0.0
            classifier.check_text(document)
            start = time.perf_counter()
            if len(document) <= _SHORT_CHARACTERS:
                ids = classifier.tokenize(document)
            else:
                ids = await anyio.to_thread.run_sync(
                    classifier.tokenize,
                    document,
                    abandon_on_cancel=True,
                    limiter=self._tokenizers,
                )
            return classifier.check(ids), time.perf_counter() - start
        except InputError as error:
            raise type(error)(f"document {index}: {error.problem}", error.remedy) from error

    def _count(self, results: Sequence[DocumentResult], predicted: float, actual: float) -> None:
        self.metrics.observe_prediction(predicted, actual)
        for result in results:
            self.metrics.document_tokens.observe(result.tokens_total)
            self.metrics.truncated_documents.inc(result.truncated)
            for stage in ("tokenize", "queue", "inference"):
                seconds = getattr(result.timings, f"{stage}_seconds")
                self.metrics.stage_seconds.labels(stage).observe(seconds)

    def _scheduler_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            logger.critical("the scheduler has ended", exc_info=task.exception())
            self.health.fail()

    def _breached(self, reason: str) -> None:
        logger.error("parity is broken: %s", reason)
        if self.settings.on_breach == "unready" or self.model.safe:
            self.health.breach = reason
        elif self._falling_back is None:
            self._falling_back = asyncio.create_task(self._fall_back(reason))

    async def _fall_back(self, reason: str) -> None:
        """Goes on with standard operators alone, if their golden cases are within the bound."""
        with self.scheduler.paused():
            model = None
            try:
                model = await anyio.to_thread.run_sync(load_safe_model, self._bundle, self.settings)
            except Exception:
                logger.exception("there is nothing to fall back to")
            if model is None or model.breach is not None:
                self.health.breach = reason
                return
            self.model = model
            self.parity.golden = model.golden
            self.scheduler.use(model.classifier, model.costs)
            logger.warning("serving by portable bodies alone from now on")

    @property
    def _whole_only(self) -> str | None:
        if self.model.classifier.chunked is not None:
            return None
        return self._bundle.manifest.whole_only or f"{self.model.classifier.engine.name} has none"

    def info(self) -> Info:
        """What ``GET /info`` answers."""
        classifier, settings = self.model.classifier, self.settings
        manifest = classifier.manifest
        return Info(
            version=__version__,
            engine=classifier.engine.name,
            safe=self.model.safe,
            labels=list(manifest.labels),
            vocab_size=manifest.vocab_size,
            precision=manifest.precision,
            operators=manifest.operators,
            tokenizer=classifier.has_tokenizer,
            limits=Limits(
                max_tokens=classifier.max_tokens,
                max_characters=settings.max_characters,
                max_documents=settings.max_documents,
                max_body_bytes=settings.max_body_bytes,
                max_queue_seconds=settings.max_queue_seconds,
                deadline_seconds=settings.deadline_seconds,
                budget_tokens=settings.budget_tokens,
                whole_tokens=min(classifier.whole_tokens, classifier.max_tokens),
                long_documents=settings.long_documents,
                whole_only=self._whole_only,
            ),
            calibration=Calibration(
                pace=self.scheduler.pace.value, **self.scheduler.costs.to_dict()
            ),
        )
