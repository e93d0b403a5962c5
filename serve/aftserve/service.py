"""The parts of the server together: from a request's documents to their answers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

from aftexport import __version__
from aftexport.errors import InputError
from aftserve.admission import Admission
from aftserve.calibration import Costs
from aftserve.classifier import Classifier, Tokens
from aftserve.errors import DocumentTooLongError, UnavailableError
from aftserve.health import Health
from aftserve.metrics import Metrics
from aftserve.scheduler import Scheduler
from aftserve.schemas import Calibration, DocumentResult, InferRequest, Info, Limits, Timings
from aftserve.settings import Settings
from aftserve.watchdog import watched_loop

logger = logging.getLogger(__name__)

_TOKENIZER_THREADS = 2
"""One for a long text, one for the short ones that come meanwhile."""


class Service:
    """Everything behind the HTTP interface.

    Args:
        classifier: with its engine.
        costs: of its runs.
        settings: of the server.
    """

    def __init__(self, classifier: Classifier, costs: Costs, settings: Settings) -> None:
        self.classifier = classifier
        self.settings = settings
        self.health = Health()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            classifier,
            costs,
            self.metrics,
            budget_tokens=settings.budget_tokens,
            stall_seconds=settings.stall_seconds,
        )
        self.admission = Admission(self.scheduler, settings.max_queue_seconds)
        self._tokenizers = anyio.CapacityLimiter(_TOKENIZER_THREADS)
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
        async with watched_loop(self.settings.stall_seconds):
            yield
        scheduling.cancel()

    def _scheduler_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            logger.critical("the scheduler has ended", exc_info=task.exception())
            self.health.fail()

    def info(self) -> Info:
        """What ``GET /info`` answers."""
        manifest, settings = self.classifier.manifest, self.settings
        return Info(
            version=__version__,
            engine=self.classifier.engine.name,
            labels=list(manifest.labels),
            vocab_size=manifest.vocab_size,
            precision=manifest.precision,
            operators=manifest.operators,
            tokenizer=self.classifier.has_tokenizer,
            limits=Limits(
                max_tokens=self.classifier.max_tokens,
                max_characters=settings.max_characters,
                max_documents=settings.max_documents,
                max_body_bytes=settings.max_body_bytes,
                max_queue_seconds=settings.max_queue_seconds,
                deadline_seconds=settings.deadline_seconds,
                budget_tokens=settings.budget_tokens,
            ),
            calibration=Calibration(
                pace=self.scheduler.pace.value, **self.scheduler.costs.to_dict()
            ),
        )

    def check_open(self) -> None:
        """Refuses a request before it is read.

        Raises:
            UnavailableError: where the server answers none.
            BusyError: where the queue is too long.
        """
        if not self.health.answers:
            raise UnavailableError(f"The server is {self.health.status}.", "Ask another one.", 1)
        self.admission.check_queue()

    async def classify(self, request: InferRequest, deadline: float) -> list[DocumentResult]:
        """Answers a request whole; cancelled, it leaves nothing in the queue.

        Args:
            request: checked as to its form.
            deadline: of the client, by ``time.monotonic``.

        Raises:
            InputError: where a document cannot be classified.
            RefusedError: where it cannot be in time.
            EngineError: where the engine fails on one.
        """
        if request.count > self.settings.max_documents:
            raise DocumentTooLongError(
                f"The request has {request.count} documents, this server takes "
                f"{self.settings.max_documents}.",
                "Send them in several requests.",
            )
        documents = [await self._tokens(index, request) for index in range(request.count)]
        tokens = [ids for ids, _ in documents]
        admitted = time.monotonic()
        predicted = self.admission.admit([len(ids) for ids in tokens], deadline - admitted)
        futures = [self.scheduler.submit(ids, admitted + predicted) for ids in tokens]
        results = []
        try:
            for future, (ids, tokenize_seconds) in zip(futures, documents, strict=True):
                done = await future
                timings = Timings(
                    tokenize_seconds=tokenize_seconds,
                    queue_seconds=done.started - admitted,
                    inference_seconds=done.inference_seconds,
                    predicted_seconds=predicted,
                )
                results.append(
                    DocumentResult(
                        label=done.answer.label,
                        scores=done.answer.scores,
                        tokens_total=len(ids),
                        tokens_used=len(ids),
                        truncated=False,
                        timings=timings,
                    )
                )
        finally:
            for future in futures:
                future.cancel()
        self._count(results, predicted, time.monotonic() - admitted)
        return results

    async def _tokens(self, index: int, request: InferRequest) -> tuple[Tokens, float]:
        """The checked tokens of a document, and the seconds it took to make them of a text."""
        try:
            if request.input_ids is not None:
                return self.classifier.check(request.input_ids[index]), 0.0
            text = request.text if request.text is not None else (request.texts or [])[index]
            self.classifier.check_text(text)
            start = time.perf_counter()
            ids = await anyio.to_thread.run_sync(
                self.classifier.tokenize, text, abandon_on_cancel=True, limiter=self._tokenizers
            )
            return self.classifier.check(ids), time.perf_counter() - start
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
