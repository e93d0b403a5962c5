"""From a request's documents to their results, with the active bundle."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from aftexport.bundle.bundle import Bundle
from aftexport.heads import Head, is_one_label
from aftserve.errors import DocumentTooLongError, UnavailableError
from aftserve.model.active import ActiveBundle
from aftserve.model.classifier import Answer
from aftserve.model.evidence import explain
from aftserve.model.inputs import TokenizedDocument, tokenize_document, tokenize_documents
from aftserve.model.load import LoadedModel
from aftserve.model.reload import Reloader
from aftserve.model.tokenizer_pool import TokenizerPool
from aftserve.observability.health import Health
from aftserve.observability.metrics import Metrics
from aftserve.observability.tracing import Traces
from aftserve.parity.breach_handler import BreachHandler
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
class _Times:
    """The times of a request: points by ``time.monotonic``, and a prediction.

    Attributes:
        began: start of tokenization.
        admitted: end of tokenization, and start of the wait for the engine.
        predicted: predicted seconds from ``admitted`` to the answer.
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
    """The server behind its HTTP interface.

    Args:
        bundle: a checked bundle.
        model: the loaded model of the bundle.
        settings: settings of the server.
        traces: traces of the requests; none by default.
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
        self._breaches = BreachHandler(settings, self.health, self.scheduler)
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
        # When the scheduler ends, it gives every waiting client an error.
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
        """Check that the server takes requests, before it reads one.

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
            inputs = await tokenize_documents(
                self._tokenizers, active.model.classifier, documents, with_evidence=spans > 0
            )
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
            classifier = active.model.classifier
            ids, _ = await tokenize_document(self._tokenizers, classifier, 0, document)
            if classifier.in_chunks(len(ids)):
                raise DocumentTooLongError(
                    f"A document for PyTorch must have at most {classifier.whole_tokens} tokens, "
                    f"because PyTorch runs it whole; got {len(ids)}.",
                    "Send a shorter one.",
                )
            _, (result,) = await self._run(active, [ids], deadline)
            return await parity.check(ids, result.answer.outputs)

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
        one: TokenizedDocument,
        result: Result,
        queue_seconds: float,
        predicted: float,
    ) -> DocumentResult:
        return DocumentResult(
            bundle=active.bundle.digest,
            **_fields(active.bundle.manifest.heads, result.answer),
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
        self, active: ActiveBundle, one: TokenizedDocument, result: Result, spans: int
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

    def _trace(
        self, inputs: Sequence[TokenizedDocument], done: Sequence[Result], times: _Times
    ) -> None:
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
        """Answer new requests with a bundle; accepted requests stay with the bundle before."""
        await self._breaches.wait()
        before, self.active, self.parity = self.parity, active, self._monitor(active)
        self._breaches.clear()
        self.scheduler.forget()
        self.metrics.observe_bundle(active.bundle.digest, active.since.timestamp())
        await before.retire()

    def _handle_breach(self, active: ActiveBundle, reason: str) -> None:
        logger.error("parity is broken: %s", reason)
        if active is self.active:  # otherwise another bundle answers by now
            self._breaches.handle(active, reason)


def _fields(heads: Mapping[str, Head], answer: Answer) -> dict[str, Any]:
    """Return the fields of a document's answer that its heads fill."""
    if is_one_label(heads):
        (content,) = answer.heads.values()
        return content.model_dump()
    return {"heads": answer.heads}
