"""The parts of the server together: from a request's documents to their answers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread

from aftexport.bundle import Bundle
from aftexport.errors import InputError
from aftserve.errors import DocumentTooLongError, UnavailableError
from aftserve.model.active import Served
from aftserve.model.evidence import explain
from aftserve.model.load import LoadedModel, load_safe_model
from aftserve.model.reload import Reloading
from aftserve.model.tokenizer_pool import TokenizerPool
from aftserve.observability.health import Health
from aftserve.observability.metrics import Metrics
from aftserve.observability.tracing import Traces
from aftserve.parity.monitor import Parity
from aftserve.parity.reference import ReferenceProcess
from aftserve.scheduling.admission import Admission
from aftserve.scheduling.job import Backlog, Result
from aftserve.scheduling.scheduler import Scheduler
from aftserve.scheduling.watchdog import watched_loop
from aftserve.schemas import DocumentResult, ParityCheck, Timings
from aftserve.settings import Settings
from aftserve.types import Document, Tokens

logger = logging.getLogger(__name__)


class Service:
    """Everything behind the HTTP interface.

    Args:
        bundle: a checked bundle.
        model: of it, loaded.
        settings: of the server.
        traces: of its requests; none where it is left out.
    """

    def __init__(
        self,
        bundle: Bundle,
        model: LoadedModel,
        settings: Settings,
        traces: Traces | None = None,
    ) -> None:
        self.settings = settings
        self.traces = traces or Traces()
        self.served = Served(bundle, model)
        self.health = Health()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.metrics,
            budget_tokens=settings.budget_tokens,
            stall_seconds=settings.stall_seconds,
            idle_seconds=settings.idle_seconds,
        )
        self.parity = self._parity(self.served)
        self.reloading = Reloading(settings, self._serve, self.metrics)
        self._admission = Admission(self.scheduler, settings.max_queue_seconds)
        self._tokenizers = TokenizerPool()
        self._falling_back: asyncio.Task[None] | None = None
        self.metrics.observe_bundle(bundle.digest, self.served.since.timestamp())
        self.metrics.ready.set_function(lambda: self.health.ready)
        self.metrics.pace.set_function(lambda: self.scheduler.pace.value)
        self.metrics.waiting_documents.set_function(lambda: self.scheduler.waiting_documents)
        self.metrics.running_documents.set_function(lambda: self.scheduler.running_documents)
        self.metrics.idle.set_function(lambda: self.scheduler.idle)
        self.metrics.backlog_seconds.set_function(lambda: self.scheduler.backlog_seconds)

    @property
    def model(self) -> LoadedModel:
        """That answers what comes from now on."""
        return self.served.model

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answers requests while the block runs."""
        scheduling = asyncio.create_task(self.scheduler.serve())
        scheduling.add_done_callback(self._scheduler_ended)
        # With the scheduler, whoever still waits gets an error.
        self.health.when_failed(scheduling.cancel)
        self.health.phase = "ready"
        if self.model.breach is not None:
            self._breached(self.served, self.model.breach)
        async with watched_loop(self.settings.stall_seconds):
            yield
        self.reloading.close()
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
        self,
        documents: Sequence[Document],
        deadline: float,
        *,
        spans: int = 0,
        request: Backlog | None = None,
    ) -> list[DocumentResult]:
        """Answers documents of a request; cancelled, it leaves nothing in the queue.

        Args:
            documents: all of the request, or some, in order.
            deadline: of the client, by ``time.monotonic``.
            spans: most of each one's evidence; 0 for none.
            request: where the documents come one after the other, what waits of those.

        Raises:
            InputError: where a document cannot be classified.
            RefusedError: where it cannot be in time.
            EngineError: where the engine fails on one.
            StorageError: where one that runs in chunks finds no space.
        """
        async with self.parity.held() as parity:
            served = parity.served
            began = time.monotonic()
            tokenizing = (self._tokens(served, *numbered) for numbered in enumerate(documents))
            tokenized = [await one for one in tokenizing]
            admitted = time.monotonic()
            classifier = served.model.classifier
            tokens = [classifier.cut(ids) for ids, _ in tokenized]
            for used in tokens if spans else ():
                classifier.check_evidence(len(used))
            predicted, done = await self._run(
                served, tokens, deadline, evidence=spans > 0, request=request
            )
            for ids, result in zip(tokens, done, strict=True):
                if not classifier.in_chunks(len(ids)):  # PyTorch has no chunks
                    parity.sample(ids, result)
        results = [
            DocumentResult(
                bundle=served.bundle.digest,
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
        if spans:
            for document, answered, result in zip(documents, results, done, strict=True):
                cut = answered.tokens_total - answered.tokens_used
                first = cut if classifier.policy == "tail" else 0
                explaining = partial(
                    explain, classifier, document, result.answer, first=first, most=spans
                )
                answered.evidence = await self._tokenizers.run(document, explaining)
        ended = time.monotonic()
        self._count(results, predicted, ended - admitted)
        total = sum(result.tokens_total for result in results)
        self.traces.record("tokenize", began, admitted, documents=len(results), tokens=total)
        for used, result in zip(tokens, done, strict=True):
            self.traces.record("queue", admitted, result.started, tokens=len(used))
            self.traces.record(
                "infer",
                result.started,
                result.started + result.inference_seconds,
                tokens=len(used),
                batch_documents=result.batch_documents,
                predicted_seconds=predicted,
                actual_seconds=ended - admitted,
            )
        return results

    async def compare(self, document: Document, deadline: float) -> ParityCheck:
        """Answers a document and compares that with PyTorch; see ``classify``.

        Raises:
            NotFoundError: where there is no PyTorch model.
            ReferenceError: where it fails.
        """
        async with self.parity.held() as parity:
            served = parity.served
            ids, _ = await self._tokens(served, 0, document)
            if served.model.classifier.in_chunks(len(ids)):
                raise DocumentTooLongError(
                    f"The document has {len(ids)} tokens; PyTorch takes it whole, which is over "
                    "the memory budget.",
                    "Send a shorter one.",
                )
            _, (result,) = await self._run(served, [ids], deadline)
            return await parity.check(ids, result.answer.logits)

    async def _run(
        self,
        served: Served,
        documents: Sequence[Tokens],
        deadline: float,
        *,
        evidence: bool = False,
        request: Backlog | None = None,
    ) -> tuple[float, list[Result]]:
        """What they were predicted to take together, and their results."""
        request = request or Backlog()
        now = time.monotonic()
        lengths = [len(ids) for ids in documents]
        predicted = self._admission.admit(served.model, lengths, deadline - now, request)
        futures = [
            self.scheduler.submit(served, ids, now + predicted, evidence=evidence, request=request)
            for ids in documents
        ]
        try:
            return predicted, [await future for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _alone(self, served: Served, ids: Tokens) -> Result:
        promised = time.monotonic() + self.scheduler.backlog_seconds
        return await self.scheduler.submit(served, ids, promised, alone=True)

    async def _tokens(self, served: Served, index: int, document: Document) -> tuple[Tokens, float]:
        """The checked tokens of a document, and the seconds it took to make them of a text."""
        classifier = served.model.classifier
        try:
            if not isinstance(document, str):
                return classifier.check(document), 0.0
            classifier.check_text(document)  # before it waits for a thread
            start = time.perf_counter()
            ids = await self._tokenizers.encode(classifier, document)
            return ids, time.perf_counter() - start
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

    def _parity(self, served: Served) -> Parity:
        settings = self.settings
        return Parity(
            served,
            ReferenceProcess(served.bundle, settings) if settings.reference else None,
            share=settings.shadow,
            alone=self._alone,
            seconds=settings.deadline_seconds,
            on_breach=self._breached,
            metrics=self.metrics,
        )

    async def _serve(self, served: Served) -> None:
        """Answers by what was loaded, from now on; what was accepted stays where it is."""
        if self._falling_back is not None:
            await asyncio.wait({self._falling_back})
        before, self.served, self.parity = self.parity, served, self._parity(served)
        self._falling_back = None
        self.scheduler.forget()
        self.health.breach = None
        self.metrics.observe_bundle(served.bundle.digest, served.since.timestamp())
        await before.retire()

    def _breached(self, served: Served, reason: str) -> None:
        logger.error("parity is broken: %s", reason)
        if served is not self.served:
            return  # by now another one answers
        if self.settings.on_breach == "unready" or self.model.safe:
            self.health.breach = reason
        elif self._falling_back is None:
            self._falling_back = asyncio.create_task(self._fall_back(served, reason))

    async def _fall_back(self, served: Served, reason: str) -> None:
        """Goes on with standard operators alone, if their golden cases are within the bound."""
        with self.scheduler.paused():
            model = None
            try:
                model = await anyio.to_thread.run_sync(
                    load_safe_model, served.bundle, self.settings
                )
            except Exception:
                logger.exception("there is nothing to fall back to")
            if model is None or model.breach is not None:
                self.health.breach = reason
                return
            served.model = model
            self.scheduler.forget()
            logger.warning("serving by portable bodies alone from now on")
