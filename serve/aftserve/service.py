"""The server's parts together: from a request's documents to their results."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import anyio
import anyio.to_thread

from aftexport.bundle.bundle import Bundle
from aftexport.errors import InputError
from aftserve.errors import DocumentTooLongError, UnavailableError
from aftserve.model.active import ActiveBundle
from aftserve.model.evidence import explain
from aftserve.model.load import LoadedModel, load_standard_ops_model
from aftserve.model.reload import Reloader
from aftserve.model.tokenizer_pool import TokenizerPool
from aftserve.observability.health import Health
from aftserve.observability.metrics import Metrics
from aftserve.observability.tracing import Traces
from aftserve.parity.monitor import ParityMonitor
from aftserve.parity.reference import ReferenceProcess
from aftserve.scheduling.admission import Admission
from aftserve.scheduling.job import Backlog, Result
from aftserve.scheduling.scheduler import Scheduler
from aftserve.scheduling.watchdog import watched_loop
from aftserve.schemas import DocumentResult, Evidence, ParityCheck, Timings
from aftserve.settings import Settings
from aftserve.types import Document, Tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Input:
    """A document of a request, tokenized.

    Attributes:
        document: the document as it was sent.
        ids: all of its tokens.
        used: the tokens that the policy for long documents leaves.
        tokenize_seconds: time of the tokenizer.
    """

    document: Document
    ids: Tokens
    used: Tokens
    tokenize_seconds: float


@dataclass(frozen=True)
class _Times:
    """The times of a request; all but one by ``time.monotonic``.

    Attributes:
        began: start of tokenization.
        admitted: end of tokenization, and start of the wait for the engine.
        predicted: seconds from then to the answer, as predicted.
        ended: end of the last stage.
    """

    began: float
    admitted: float
    predicted: float
    ended: float

    @property
    def actual(self) -> float:
        """Seconds from the end of tokenization to the answer."""
        return self.ended - self.admitted


class Service:
    """Everything behind the HTTP interface.

    Args:
        bundle: a checked bundle.
        model: the loaded model of the bundle.
        settings: settings of the server.
        traces: traces of its requests; none by default.
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
        self.active = ActiveBundle(bundle, model)
        self.health = Health()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            self.metrics,
            budget_tokens=settings.budget_tokens,
            stall_seconds=settings.stall_seconds,
            idle_seconds=settings.idle_seconds,
        )
        self.parity = self._monitor(self.active)
        self.reloader = Reloader(settings, self._activate, self.metrics)
        self._admission = Admission(self.scheduler, settings.max_queue_seconds)
        self._tokenizers = TokenizerPool()
        self._falling_back: asyncio.Task[None] | None = None
        self.metrics.observe_bundle(bundle.digest, self.active.since.timestamp())
        self.metrics.ready.set_function(lambda: self.health.ready)
        self.metrics.slowdown.set_function(lambda: self.scheduler.slowdown.value)
        self.metrics.waiting_documents.set_function(lambda: self.scheduler.waiting_documents)
        self.metrics.running_documents.set_function(lambda: self.scheduler.running_documents)
        self.metrics.idle.set_function(lambda: self.scheduler.idle)
        self.metrics.backlog_seconds.set_function(lambda: self.scheduler.backlog_seconds)

    @property
    def model(self) -> LoadedModel:
        """The model that answers new requests."""
        return self.active.model

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within the block."""
        scheduling = asyncio.create_task(self.scheduler.serve())
        scheduling.add_done_callback(self._end_with_scheduler)
        # The scheduler's end gives every waiting client an error.
        self.health.when_failed(scheduling.cancel)
        self.health.phase = "ready"
        if self.model.breach is not None:
            self._handle_breach(self.active, self.model.breach)
        async with watched_loop(self.settings.stall_seconds):
            yield
        self.reloader.close()
        await self.parity.close()
        scheduling.cancel()

    def check_open(self) -> None:
        """Check that the server takes requests, before one is read.

        Raises:
            UnavailableError: if the server answers no requests.
            BusyError: if the queue is too long.
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
        backlog: Backlog | None = None,
    ) -> list[DocumentResult]:
        """Classify documents of a request; cancellation removes them from the queue.

        Args:
            documents: all documents of the request, or some, in order.
            deadline: the client's deadline by ``time.monotonic``.
            spans: maximum number of evidence spans of each document; 0 for no evidence.
            backlog: queued documents of the same request, if they arrive one after the other.

        Raises:
            InputError: if a document cannot be classified.
            RefusedError: if it cannot be classified in time.
            EngineError: if the engine fails on a document.
            StorageError: if a document in chunks finds no space.
        """
        async with self.parity.held() as parity:
            active = parity.active
            began = time.monotonic()
            inputs = await self._tokenize(active, documents, with_evidence=spans > 0)
            admitted = time.monotonic()
            used = [one.used for one in inputs]
            predicted, done = await self._run(
                active, used, deadline, evidence=spans > 0, backlog=backlog
            )
            for ids, result in zip(used, done, strict=True):
                if not active.model.classifier.in_chunks(len(ids)):  # PyTorch has no chunks
                    parity.sample(ids, result)
        results = [
            self._result(active, one, result, result.started - admitted, predicted)
            for one, result in zip(inputs, done, strict=True)
        ]
        if spans:
            for answered, one, result in zip(results, inputs, done, strict=True):
                answered.evidence = await self._explain(active, one, result, spans)
        times = _Times(began, admitted, predicted, time.monotonic())
        self._count(results, times)
        self._trace(inputs, done, times)
        return results

    async def compare(self, document: Document, deadline: float) -> ParityCheck:
        """Classify a document and compare the outputs with PyTorch; see ``classify``.

        Raises:
            NotFoundError: if there is no PyTorch model.
            ReferenceError: if PyTorch fails.
        """
        async with self.parity.held() as parity:
            active = parity.active
            ids, _ = await self._tokens(active, 0, document)
            if active.model.classifier.in_chunks(len(ids)):
                raise DocumentTooLongError(
                    f"The document has {len(ids)} tokens; PyTorch takes it whole, which is over "
                    "the memory budget.",
                    "Send a shorter one.",
                )
            _, (result,) = await self._run(active, [ids], deadline)
            return await parity.check(ids, result.answer.logits)

    async def _tokenize(
        self, active: ActiveBundle, documents: Sequence[Document], *, with_evidence: bool
    ) -> list[_Input]:
        """Tokenize documents, and cut them by the policy for long documents."""
        classifier = active.model.classifier
        tokenized = [await self._tokens(active, *numbered) for numbered in enumerate(documents)]
        inputs = [
            _Input(document, ids, classifier.cut(ids), seconds)
            for document, (ids, seconds) in zip(documents, tokenized, strict=True)
        ]
        for one in inputs if with_evidence else ():
            classifier.check_evidence(len(one.used))
        return inputs

    async def _tokens(
        self, active: ActiveBundle, index: int, document: Document
    ) -> tuple[Tokens, float]:
        """Return a document's checked tokens, and the seconds that the tokenizer took."""
        classifier = active.model.classifier
        try:
            if not isinstance(document, str):
                return classifier.check(document), 0.0
            classifier.check_text(document)  # before it waits for a thread
            start = time.perf_counter()
            ids = await self._tokenizers.encode(classifier, document)
            return ids, time.perf_counter() - start
        except InputError as error:
            raise type(error)(f"document {index}: {error.problem}", error.remedy) from error

    async def _run(
        self,
        active: ActiveBundle,
        documents: Sequence[Tokens],
        deadline: float,
        *,
        evidence: bool = False,
        backlog: Backlog | None = None,
    ) -> tuple[float, list[Result]]:
        """Run documents; return the predicted seconds of them all, and their results."""
        backlog = backlog or Backlog()
        now = time.monotonic()
        lengths = [len(ids) for ids in documents]
        predicted = self._admission.admit(active.model, lengths, deadline - now, backlog)
        futures = [
            self.scheduler.submit(active, ids, now + predicted, evidence=evidence, backlog=backlog)
            for ids in documents
        ]
        try:
            return predicted, [await future for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _run_single(self, active: ActiveBundle, ids: Tokens) -> Result:
        promised = time.monotonic() + self.scheduler.backlog_seconds
        return await self.scheduler.submit(active, ids, promised, single=True)

    def _result(
        self,
        active: ActiveBundle,
        one: _Input,
        result: Result,
        queue_seconds: float,
        predicted: float,
    ) -> DocumentResult:
        return DocumentResult(
            bundle=active.bundle.digest,
            label=result.answer.label,
            scores=result.answer.scores,
            tokens_total=len(one.ids),
            tokens_used=len(one.used),
            truncated=len(one.used) < len(one.ids),
            policy=self.settings.long_documents,
            timings=Timings(
                tokenize_seconds=one.tokenize_seconds,
                queue_seconds=queue_seconds,
                inference_seconds=result.inference_seconds,
                predicted_seconds=predicted,
            ),
        )

    async def _explain(
        self, active: ActiveBundle, one: _Input, result: Result, spans: int
    ) -> Evidence:
        classifier = active.model.classifier
        first = len(one.ids) - len(one.used) if classifier.policy == "tail" else 0
        explaining = partial(
            explain, classifier, one.document, result.answer, first=first, max_spans=spans
        )
        return await self._tokenizers.run(one.document, explaining)

    def _count(self, results: Sequence[DocumentResult], times: _Times) -> None:
        """Count an answered request in the metrics."""
        self.metrics.observe_prediction(times.predicted, times.actual)
        for result in results:
            self.metrics.document_tokens.observe(result.tokens_total)
            self.metrics.truncated_documents.inc(result.truncated)
            for stage in ("tokenize", "queue", "inference"):
                seconds = getattr(result.timings, f"{stage}_seconds")
                self.metrics.stage_seconds.labels(stage).observe(seconds)

    def _trace(self, inputs: Sequence[_Input], done: Sequence[Result], times: _Times) -> None:
        """Record the stages of an answered request in its trace."""
        total = sum(len(one.ids) for one in inputs)
        self.traces.record(
            "tokenize", times.began, times.admitted, documents=len(inputs), tokens=total
        )
        for one, result in zip(inputs, done, strict=True):
            self.traces.record("queue", times.admitted, result.started, tokens=len(one.used))
            self.traces.record(
                "infer",
                result.started,
                result.started + result.inference_seconds,
                tokens=len(one.used),
                batch_documents=result.batch_documents,
                predicted_seconds=times.predicted,
                actual_seconds=times.actual,
            )

    def _end_with_scheduler(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            logger.critical("the scheduler has ended", exc_info=task.exception())
            self.health.fail()

    def _monitor(self, active: ActiveBundle) -> ParityMonitor:
        settings = self.settings
        return ParityMonitor(
            active,
            ReferenceProcess(active.bundle, settings) if settings.reference else None,
            share=settings.shadow,
            run_single=self._run_single,
            seconds=settings.deadline_seconds,
            on_breach=self._handle_breach,
            metrics=self.metrics,
        )

    async def _activate(self, active: ActiveBundle) -> None:
        """Answer new requests by a bundle; accepted ones stay with the bundle before."""
        if self._falling_back is not None:
            await asyncio.wait({self._falling_back})
        before, self.active, self.parity = self.parity, active, self._monitor(active)
        self._falling_back = None
        self.scheduler.forget()
        self.health.breach = None
        self.metrics.observe_bundle(active.bundle.digest, active.since.timestamp())
        await before.retire()

    def _handle_breach(self, active: ActiveBundle, reason: str) -> None:
        logger.error("parity is broken: %s", reason)
        if active is not self.active:
            return  # another bundle answers by now
        if self.settings.on_breach == "unready" or self.model.uses_standard_ops_only:
            self.health.breach = reason
        elif self._falling_back is None:
            self._falling_back = asyncio.create_task(self._fall_back(active, reason))

    async def _fall_back(self, active: ActiveBundle, reason: str) -> None:
        """Go on with standard operators only, if their golden cases are within the bound."""
        with self.scheduler.paused():
            model = None
            try:
                model = await anyio.to_thread.run_sync(
                    load_standard_ops_model, active.bundle, self.settings
                )
            except Exception:
                logger.exception("the model cannot be loaded with portable bodies only")
            if model is None or model.breach is not None:
                self.health.breach = reason
                return
            active.model = model
            self.scheduler.forget()
            logger.warning("serving with portable bodies only from now on")
