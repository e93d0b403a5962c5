"""One model: from the documents of a request to their results; and what all models share."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from aftserve.errors import DocumentTooLongError, UnavailableError
from aftserve.http.clients import LoopTurns, current_client
from aftserve.model.answers import Answer, Decoding, InlineTokens
from aftserve.model.documents import (
    DocumentAnswer,
    TokenizedDocument,
    TokenizerPool,
    document_answer,
    tokenize_document,
    tokenize_documents,
)
from aftserve.model.evidence import Explained, FurtherRuns, add_evidence, check, explain
from aftserve.model.feature_tokens import FeatureSpace
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.model.reload import BundleLoader, Reloader
from aftserve.model.wanted import EVERY_HEAD, NO_HEAD, NO_OPTIONS, AnswerOptions, Wanted
from aftserve.observability.health import Health, ModelHealth
from aftserve.observability.metrics import Metrics, ModelMetrics
from aftserve.observability.tracing import Traces, exemplar_labels
from aftserve.parity.monitor import BreachHandler, ParityCheck, ParityMonitor
from aftserve.parity.reference import ReferenceProcess
from aftserve.scheduling.admission import Admission
from aftserve.scheduling.batching import Backlog, Job, Result
from aftserve.scheduling.scheduler import Scheduler
from aftserve.scheduling.watchdog import watched_loop
from aftserve.schemas import DocumentResult, Timings
from aftserve.settings import Settings
from aftserve.types import Document, ExtraFields

logger = logging.getLogger(__name__)


class SharedResources:
    """The settings, the queue, the engine's thread and the observability of all models."""

    def __init__(self, settings: Settings, traces: Traces | None = None) -> None:
        self.settings = settings
        self.traces = traces or Traces()
        self.health = Health()
        self.metrics = Metrics()
        self.scheduler = Scheduler(
            budget_tokens=settings.budget_tokens,
            stall_seconds=settings.stall_seconds,
            idle_seconds=settings.idle_seconds,
        )
        self.admission = Admission(self.scheduler, settings.max_queue_seconds)
        self.turns = LoopTurns()  # of requests on the event loop
        self.tokenizers = TokenizerPool(self.turns)
        self.feature_space = FeatureSpace(settings.spill, settings.max_arrays_bytes)
        self.loader = BundleLoader()  # the turns in which bundles are loaded
        self.metrics.waiting_documents.set_function(lambda: self.scheduler.waiting_documents)
        self.metrics.running_documents.set_function(lambda: self.scheduler.running_documents)
        self.metrics.idle.set_function(lambda: self.scheduler.idle)
        self.metrics.backlog_seconds.set_function(
            lambda: self.scheduler.predictions.backlog_seconds
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the scheduler within the block, and watch the event loop."""
        scheduling = asyncio.create_task(self.scheduler.serve())
        scheduling.add_done_callback(self._end_with_scheduler)
        # When the scheduler ends, it gives every waiting client an error.
        self.health.when_failed(scheduling.cancel)
        self.health.phase = "ready"
        async with watched_loop(self.settings.stall_seconds):
            yield
        scheduling.cancel()

    def _end_with_scheduler(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            logger.critical("the scheduler has ended", exc_info=task.exception())
            self.health.fail()


class Service:
    """One model behind the interfaces of the server."""

    def __init__(
        self,
        name: str,
        active: ActiveBundle,
        settings: Settings,  # those of the server, and the model's own
        shared: SharedResources,
        reloader: Reloader,
    ) -> None:
        self.name = name
        self.settings = settings
        self.shared = shared
        self.active = active
        self.reloader = reloader
        self.health = ModelHealth(shared.health)
        self.metrics = shared.metrics.of(name)
        self.scheduler = shared.scheduler
        self.traces = shared.traces
        self.holders = _Holders()  # an unload waits for them
        self.parity = self._monitor(active)
        self._breaches = BreachHandler(settings, self.health, self.scheduler, shared.loader)
        self._retired = False
        self.metrics.ready.set_function(lambda: self.health.ready)
        self.metrics.slowdown.set_function(lambda: self.model.slowdown.value)
        self._begin(active)

    @property
    def model(self) -> LoadedModel:
        """The model that answers new requests."""
        return self.active.model

    def check_breach(self) -> None:
        """React to golden cases that are out of bound; the event loop runs."""
        if self.model.breach is not None:
            self._handle_breach(self.active, self.model.breach)

    async def retire(self) -> None:
        """Wait until the accepted requests are answered, and free what belongs to the model."""
        await self.holders.released()
        self._retired = True
        await self.parity.retire()
        # Only now: the last requests may have begun a fallback, which replaces the model.
        await self._breaches.wait()
        self.scheduler.forget(self.model)

    async def close(self) -> None:
        """Cancel the comparisons with PyTorch, and end its process."""
        await self.parity.close()

    def check_open(self) -> None:
        """Check that the model takes requests, before the server reads one.

        Raises:
            UnavailableError: if the model answers no requests.
            BusyError: if the queue is too long.
        """
        if not self.health.answers:
            raise UnavailableError(f"The server is {self.health.status}.", "Ask another one.", 1)
        self.shared.admission.check_queue(current_client.get())

    async def classify(
        self,
        documents: Sequence[Document],  # all of the request, or some, in order
        deadline: float,  # by time.monotonic()
        given: Sequence[ExtraFields] | None = None,
        *,
        options: AnswerOptions = NO_OPTIONS,
        # Of the same request, if its documents arrive one after the other.
        backlog: Backlog | None = None,
        # None if answers for tokens are not part of JSON objects.
        inline: InlineTokens | None = None,
    ) -> list[DocumentAnswer]:
        """Classify documents of a request; cancellation removes them from the queue.

        Raises:
            InputError: if a document cannot be classified, or the model lacks an option's head.
            DocumentTooLongError: if it is over a limit.
            RefusedError: if it cannot be classified in time.
            EngineError: if the engine fails on a document.
            StorageError: if a document in chunks finds no space.
        """
        async with self._held() as parity:
            active = parity.active
            wanted = options.wanted(active.bundle.manifest)
            began = time.monotonic()
            inputs = await self._tokenize(active, documents, given, wanted, inline)
            admitted = time.monotonic()
            with self.metrics.inference.counting_failures(began):
                predicted, done = await self._run_with_samples(
                    parity, inputs, deadline, wanted=wanted, backlog=backlog
                )
        results = []
        for one, result in zip(inputs, done, strict=True):
            await self.shared.turns.take()
            queued = result.started - admitted
            results.append(self._result(active, one, _part(result, wanted), queued, predicted))
        if options.spans:
            with self.metrics.inference.counting_failures(began):
                for answered, one, result in zip(results, inputs, done, strict=True):
                    found = await self._explain(active, one, result.answer, options)
                    if options.checks:
                        again = check(one, result.answer, found, options)
                        predicted += await self._run_again(active, again, deadline, backlog)
                    chosen = bool(options.explain)
                    add_evidence(answered.result, result.answer, found.evidence, is_chosen=chosen)
        record = _RequestRecord(began, admitted, predicted, time.monotonic())
        await self.shared.turns.take()
        counted = [answered.result for answered in results]
        record.count(self.metrics, counted, self.traces.trace_id())
        record.trace(self.traces, inputs, done)
        return results

    async def check(self, documents: Sequence[Document]) -> float:
        """Check documents without a run; return the tokenizer's longest seconds for one.

        Raises:
            InputError: if a document cannot be classified.
            DocumentTooLongError: if it is over a limit.
        """
        async with self._held() as parity:
            began = time.monotonic()
            inputs = await self._tokenize(parity.active, documents, None, NO_HEAD, None)
        total = sum(len(one.ids) for one in inputs)
        self.traces.record("tokenize", began, time.monotonic(), documents=len(inputs), tokens=total)
        return max(one.tokenize_seconds for one in inputs)

    async def compare(self, document: Document, deadline: float, given: ExtraFields) -> ParityCheck:
        """Classify a document and compare the outputs with PyTorch; see ``classify``.

        Raises:
            NotFoundError: if there is no PyTorch model.
            ReferenceError: if PyTorch fails.
        """
        async with self._held() as parity:
            active = parity.active
            classifier = active.model.classifier
            one = await tokenize_document(self.shared.tokenizers, classifier, 0, document, given)
            if classifier.in_chunks(len(one.ids)):
                raise DocumentTooLongError(
                    f"A document for PyTorch must have at most {classifier.whole_tokens} tokens, "
                    f"because PyTorch runs it whole; got {len(one.ids)}.",
                    "Send a shorter one.",
                )
            _, (result,) = await self._run(active, [one], [one.decoding.with_rows()], deadline)
            return await parity.check(one, result.answer)

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[ParityMonitor]:
        """Keep the model and the reference of the active bundle within the block."""
        with self.holders.held():
            async with self.parity.held() as parity:
                yield parity

    async def _tokenize(
        self,
        active: ActiveBundle,
        documents: Sequence[Document],
        given: Sequence[ExtraFields] | None,
        wanted: Wanted,
        inline: InlineTokens | None,
    ) -> list[TokenizedDocument]:
        """Tokenize documents and count the tokens that are answered inline."""
        inputs = await tokenize_documents(
            self.shared.tokenizers, active.model.classifier, documents, given, wanted
        )
        if inline is not None:
            heads = active.bundle.manifest.heads
            parts = {name: head for name, head in heads.items() if wanted.has(name)}
            inline.add(parts, [len(one.used) for one in inputs])
        return inputs

    async def _run_with_samples(
        self,
        parity: ParityMonitor,
        documents: Sequence[TokenizedDocument],
        deadline: float,
        *,
        wanted: Wanted,
        backlog: Backlog | None,
    ) -> tuple[float, list[Result]]:
        """Run documents and have a share of them compared with PyTorch; see ``_run``."""
        decodings = [parity.draw(one) for one in documents]
        predicted, results = await self._run(
            parity.active, documents, decodings, deadline, wanted=wanted, backlog=backlog
        )
        for one, decoding, result in zip(documents, decodings, results, strict=True):
            if decoding.keeps_rows:
                parity.sample(one, result)
        return predicted, results

    async def _run(
        self,
        active: ActiveBundle,
        documents: Sequence[TokenizedDocument],
        decodings: Sequence[Decoding],
        deadline: float,
        *,
        wanted: Wanted = EVERY_HEAD,
        backlog: Backlog | None = None,
    ) -> tuple[float, list[Result]]:
        """Run documents; return the predicted seconds of them all, and their results."""
        backlog = backlog or Backlog()
        lengths = [len(one.used) for one in documents]
        await self.shared.turns.take()
        client = current_client.get()
        predicted = await self.shared.admission.admit(
            active.model, lengths, deadline, backlog, client
        )
        now = time.monotonic()
        futures = [
            self.scheduler.submit(
                Job(
                    active,
                    one.used,
                    now + predicted,
                    self.metrics,
                    backlog=backlog,
                    decoding=decoding,
                    extras=one.extras,
                    # Samples are compared in every head.
                    wanted=replace(wanted, heads=None) if decoding.keeps_rows else wanted,
                    client=client.name,
                )
            )
            for one, decoding in zip(documents, decodings, strict=True)
        ]
        try:
            return predicted, [await future for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _run_again(
        self,
        active: ActiveBundle,
        again: FurtherRuns[None],
        deadline: float,
        backlog: Backlog | None,
    ) -> float:
        """Run further documents of a request, each time those that the answers lead to."""
        seconds = 0.0
        try:
            documents, wanted = next(again)
            while True:
                decodings = [one.decoding for one in documents]
                predicted, results = await self._run(
                    active, documents, decodings, deadline, wanted=wanted, backlog=backlog
                )
                seconds += predicted
                documents, wanted = again.send([result.answer for result in results])
        except StopIteration:
            return seconds

    async def _run_single(self, active: ActiveBundle, one: TokenizedDocument) -> Result:
        """Run a document again without others, and keep the rows of its tokens."""
        promised = time.monotonic() + self.scheduler.predictions.backlog_seconds
        job = Job(active, one.used, promised, self.metrics, single=True, extras=one.extras)
        job.decoding = one.decoding.with_rows()
        return await self.scheduler.submit(job)

    def _result(
        self,
        active: ActiveBundle,
        one: TokenizedDocument,
        result: Result,
        queue_seconds: float,
        predicted: float,
    ) -> DocumentAnswer:
        timings = Timings(
            tokenize_seconds=one.tokenize_seconds,
            queue_seconds=queue_seconds,
            inference_seconds=result.inference_seconds,
            predicted_seconds=predicted,
        )
        policy = active.model.classifier.policy
        return document_answer(active.bundle, policy, one, result.answer, timings)

    async def _explain(
        self,
        active: ActiveBundle,
        one: TokenizedDocument,
        answer: Answer,
        options: AnswerOptions,
    ) -> Explained:
        """Return the evidence of a document."""
        classifier = active.model.classifier
        explaining = partial(
            explain, classifier, one.document, answer, first=one.first, options=options
        )
        return await self.shared.tokenizers.run(one.document, explaining)

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

    async def activate(self, active: ActiveBundle) -> None:
        """Answer new requests with a bundle; accepted requests stay with the bundle before."""
        self.scheduler.forget(self.model)
        before, self.active, self.parity = self.parity, active, self._monitor(active)
        self._breaches.clear()
        self._begin(active)
        await before.retire()

    def _begin(self, active: ActiveBundle) -> None:
        """Measure the costs of a bundle that answers from now on."""
        self.scheduler.measure(active.model)
        self.metrics.observe_bundle(active.bundle.digest, active.since.timestamp())

    def _handle_breach(self, active: ActiveBundle, reason: str) -> None:
        logger.error("parity is broken: %s", reason)
        # Otherwise another bundle answers by now, or none.
        if active is self.active and not self._retired:
            self._breaches.handle(active, reason)


def _part(result: Result, wanted: Wanted) -> Result:
    """Return a result with only the wanted heads."""
    return replace(result, answer=result.answer.part(wanted))


@dataclass(frozen=True)
class _RequestRecord:
    """The times of an answered request: points by ``time.monotonic``, and a prediction."""

    began: float  # start of tokenization
    admitted: float  # end of tokenization, and start of the wait for the engine
    predicted: float  # seconds from admitted to the answer
    ended: float

    def count(
        self, metrics: ModelMetrics, results: Sequence[DocumentResult], trace_id: str | None
    ) -> None:
        """Count the request and its documents in the metrics, with an exemplar of the request."""
        exemplar = exemplar_labels(trace_id)
        metrics.observe_prediction(self.predicted, self.ended - self.admitted)
        timings = [result.timings for result in results]
        run_end = max(one.queue_seconds + one.inference_seconds for one in timings)
        queue = max(one.queue_seconds for one in timings)
        metrics.inference.add_answered(
            len(results),
            tokenize=self.admitted - self.began,
            queue=queue,
            run=run_end - queue,
            finish=max(0.0, self.ended - self.admitted - run_end),
        )
        for result in results:
            metrics.document_tokens.observe(result.tokens_total)
            metrics.truncated_documents.inc(result.truncated)
            for stage in ("tokenize", "queue", "inference"):
                seconds = getattr(result.timings, f"{stage}_seconds")
                metrics.stage_seconds.labels(stage).observe(seconds, exemplar)

    def trace(
        self, traces: Traces, inputs: Sequence[TokenizedDocument], done: Sequence[Result]
    ) -> None:
        """Record the stages of the request in its trace."""
        total = sum(len(one.ids) for one in inputs)
        traces.record("tokenize", self.began, self.admitted, documents=len(inputs), tokens=total)
        for one, result in zip(inputs, done, strict=True):
            traces.record("queue", self.admitted, result.started, tokens=len(one.used))
            traces.record(
                "infer",
                result.started,
                result.started + result.inference_seconds,
                tokens=len(one.used),
                batch_documents=result.batch_documents,
                predicted_seconds=self.predicted,
                actual_seconds=self.ended - self.admitted,
            )


class _Holders:
    """A count of the requests that hold a model, and of the work for them."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def add(self) -> Callable[[], None]:
        """Count a holder; it calls the returned function once, at its end."""
        self._count += 1
        self._none.clear()
        return self._release

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count a holder within the block."""
        release = self.add()
        try:
            yield
        finally:
            release()

    async def released(self) -> None:
        """Wait until the last holder has ended."""
        while self._count:
            await self._none.wait()

    def _release(self) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()
