"""The order of runs on the engine, and the outcome of each."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from aftexport.engines import RunStoppedError
from aftexport.errors import EngineError, StorageError
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftserve.errors import UnavailableError
from aftserve.model.active import ActiveBundle
from aftserve.model.answers import NO_MARKS, Answer, Decoding
from aftserve.model.cost_measurement import CostMeasurement
from aftserve.model.load import LoadedModel
from aftserve.model.slowdown import SlowdownFactor
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.observability.metrics import Metrics
from aftserve.scheduling.batching import next_batch
from aftserve.scheduling.engine_state import Idle, Measuring, Run
from aftserve.scheduling.engine_thread import EngineThread, EngineThreadError
from aftserve.scheduling.job import Backlog, Job, Progress, Result, make_progress
from aftserve.scheduling.measuring import MeasurementTurns
from aftserve.scheduling.queue import JobQueue
from aftserve.scheduling.stall_detection import wait_for_end
from aftserve.types import Tokens

logger = logging.getLogger("aftserve.scheduler")


class Scheduler:
    """A scheduler of runs, which answers the oldest documents first.

    If a shared run fails, each of its documents gets a single run, so that only the bad document
    fails. A run is stopped once all its clients have left. Between documents, the costs of the
    model are measured; see ``MeasurementTurns``. After a while without jobs, the engine releases
    the memory of its runs.

    Args:
        metrics: metrics of the server.
        budget_tokens: maximum tokens of a batch, padding included.
        stall_seconds: allowed delay of a run, beside ten times its predicted time.
        idle_seconds: time without jobs after which the engine releases its memory.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        budget_tokens: int,
        stall_seconds: float,
        idle_seconds: float,
    ) -> None:
        self.slowdown = SlowdownFactor()
        self._metrics = metrics
        self._budget_tokens = budget_tokens
        self._stall_seconds = stall_seconds
        self._idle_seconds = idle_seconds
        self._queue = JobQueue()
        self._turns: MeasurementTurns | None = None
        self._measured: asyncio.Event = asyncio.Event()
        self._closed: Exception | None = None

    @property
    def waiting_documents(self) -> int:
        """Number of queued documents."""
        return len(self._queue)

    @property
    def running_documents(self) -> int:
        """Number of documents in the current run."""
        run = self._run
        return len(run.batch) if run else 0

    @property
    def idle(self) -> bool:
        """Whether nothing runs and the engine has released the memory of its runs."""
        return self._queue.state == Idle(memory_of=None)

    @property
    def backlog_seconds(self) -> float:
        """Predicted time until every accepted document is answered."""
        return self.wait_seconds(in_chunks=True)

    @property
    def _run(self) -> Run | None:
        """The current run; None once its documents are answered.

        The engine's thread may note the end later than a client sends its next request.
        """
        state = self._queue.state
        if isinstance(state, Idle):
            return None
        run = state.run
        is_over = not run.unfinished and run.ended.done()
        return None if is_over else run

    def wait_seconds(self, *, in_chunks: bool, besides: Backlog | None = None) -> float:
        """Return the predicted time until a document that arrives now has its turn.

        Args:
            in_chunks: whether the document runs in chunks. Then it waits for all parts of other
                such documents; otherwise it runs between their parts.
            besides: documents that are left out of the prediction.
        """
        run, waiting = self._run, self._queue.backlog(besides)
        if run is not None and run.measurement is not None:
            run = None  # see measurement_seconds
        if run is not None and besides and all(job.backlog is besides for job in run.batch):
            run = None
        # A run that is late by some time is expected to take as long again.
        running = abs(run.started + run.predicted - time.monotonic()) if run else 0.0
        seconds = waiting.seconds
        after = run.seconds_after if run else 0.0
        if in_chunks:
            seconds += waiting.chunked_seconds + after
        else:
            # At most one part of a long document runs before each document.
            seconds += min(after, waiting.documents * (run.calibrated if run else 0.0))
        return running + seconds * self.slowdown.value

    def measurement_seconds(self, seconds: float) -> float:
        """Return the maximum time of measurements within the next ``seconds`` of documents."""
        state, now = self._queue.state, time.monotonic()
        delay = self._turns.delay(seconds) if self._turns is not None else 0.0
        if isinstance(state, Measuring) and not state.yields:
            delay += abs(state.run.started + state.run.predicted - now)
        return delay

    def is_measuring(self, model: LoadedModel) -> bool:
        """Return whether further measurements of a model are to come."""
        measurement = model.measurement
        return self._is_current(measurement) and not measurement.is_done

    async def wait_for_measurement(self, seconds: float) -> bool:
        """Wait for the end of a measurement or the replacement of the model.

        Args:
            seconds: maximum time of the wait.

        Returns:
            False after ``seconds`` without either.

        Raises:
            UnavailableError: if the scheduler ends.
        """
        if self._closed is None:
            try:
                await asyncio.wait_for(self._measured.wait(), seconds)
            except TimeoutError:
                return False
        if self._closed is not None:
            raise self._closed
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Begin no run within the block; a run that has begun goes on."""
        self._queue.pause(True)
        try:
            yield
        finally:
            self._queue.pause(False)

    def measure(self, model: LoadedModel) -> None:
        """Measure the costs of a model that replaces the previous one, and the slowdown again."""
        self.slowdown = SlowdownFactor()
        if model.measurement.is_complete:
            self.slowdown.trust_costs()
        self._queue.forget_memory()
        self._turns = MeasurementTurns(model)
        self._queue.measure(self._turns)
        self._wake_waiting()

    def submit(
        self,
        active: ActiveBundle,
        ids: Tokens,
        promised: float,
        *,
        single: bool = False,
        backlog: Backlog | None = None,
        decoding: Decoding = NO_MARKS,
        extras: ExtraValues = NO_EXTRAS,
        wanted: Wanted = EVERY_HEAD,
    ) -> "asyncio.Future[Result]":
        """Put a checked document in the queue.

        Args:
            active: the bundle that classifies it.
            ids: its tokens.
            promised: predicted time of the answer by ``time.monotonic``.
            single: whether the document must not share a run.
            backlog: queued documents of the same request; this one is added.
            decoding: decoding of the rows of its tokens.
            extras: extra inputs of the document.
            wanted: wanted part of the answer.

        Returns:
            A future of the result. Cancel it once the answer is no longer wanted. It raises
            EngineError if the engine fails on this document, StorageError if a document in chunks
            finds no space, and UnavailableError if the scheduler ends.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            future.set_exception(self._closed)
            return future
        job = Job(
            active,
            ids,
            active.model.costs.single(len(ids)),
            promised,
            future,
            single,
            backlog=backlog or Backlog(),
            decoding=decoding,
            extras=extras,
            wanted=wanted,
        )
        job.progress = make_progress(job)
        future.add_done_callback(lambda _: self._settle(job))
        self._queue.put(job)
        return future

    async def serve(self) -> None:
        """Run until cancelled; at the end or a failure, every waiting client gets an error.

        Raises:
            StalledError: if a run neither ends nor can be stopped.
            EngineThreadError: if the engine's thread has ended.
        """
        loop = asyncio.get_running_loop()
        runs: asyncio.Queue[Run | None] = asyncio.Queue()
        EngineThread(lambda: self._next_run(loop), runs.put_nowait, lambda: runs.put_nowait(None))
        run: Run | None = None
        try:
            while (run := await runs.get()) is not None:
                await wait_for_end(run, self._stall_seconds)
                self._answer(run)
                run = None  # free its documents before the wait for the next run
            raise EngineThreadError("The engine's thread has ended.")
        finally:
            self._close(run)

    def _next_run(self, loop: asyncio.AbstractEventLoop) -> Run | None:
        """Wait for jobs on the engine's thread, and begin a run; None ends the thread."""
        others_first = self._end_run()
        if not self._queue.wait(self._idle_seconds):
            release = self._queue.begin_release(
                lambda classifier: Run((), classifier, 0.0, 0.0, loop.create_future())
            )
            if release is not None:
                return release
        return self._queue.take(
            lambda jobs: self._make_run(jobs, others_first, loop.create_future),
            lambda turns: turns.make_run(loop.create_future),
        )

    def _end_run(self) -> bool:
        """End the current run; return whether it left parts, so that others go first."""
        run = self._run
        left_parts = run is not None and run.unfinished
        if (abandoned := self._queue.end_run()) is not None and abandoned.progress is not None:
            self._drop(abandoned.progress)
        return left_parts

    def _make_run(
        self,
        jobs: Iterable[Job],
        others_first: bool,
        create_future: "Callable[[], asyncio.Future[list[Answer] | None]]",
    ) -> Run:
        """Choose the jobs of the next run and predict its time."""
        if others_first:
            jobs = [job for job in jobs if job.progress is None] or jobs
        model = next(iter(jobs)).active.model
        batch = next_batch(
            jobs,
            model.costs,
            budget_tokens=self._budget_tokens,
            masks_padding=model.classifier.masks_padding,
            now=time.monotonic(),
        )
        if (progress := batch[0].progress) is not None:
            calibrated = seconds = batch[0].seconds / progress.left
        else:
            calibrated = sum(model.costs.single(job.tokens) for job in batch)
            seconds = model.costs.batch(len(batch), max(job.tokens for job in batch))
        predicted = seconds * self.slowdown.value
        return Run(batch, model.classifier, calibrated, predicted, create_future())

    def _settle(self, job: Job) -> None:
        """Remove a cancelled job, or stop its run once all clients of the run have left."""
        if not job.future.cancelled():
            job.future.exception()  # mark it as read: another document may have failed the request
            return
        if self._queue.remove(job):
            if job.progress is not None:
                self._drop(job.progress)
            return
        run = self._run
        if run is not None and job in run.batch and all(other.future.done() for other in run.batch):
            run.stop.request()

    def _drop(self, progress: Progress) -> None:
        """Give up the remaining parts of a document after its client has left."""
        progress.parts.close()
        if progress.started:
            self._metrics.stopped_runs.inc()

    def _answer(self, run: Run) -> None:
        """Settle the jobs of a run that has ended."""
        if run.measurement is not None:
            self._end_measurement(run, run.measurement)
            return
        batch = run.batch
        match run.ended.exception():
            case None if batch:
                self._answer_batch(run)
            case None:
                pass  # memory was released
            case EngineThreadError() as error:
                raise error
            case RunStoppedError():
                self._metrics.stopped_runs.inc()
                self._fail(batch, EngineError("The run took far too long.", "Try again later."))
            case error:
                self._metrics.failed_runs.inc()
                logger.warning("a run of %d documents failed: %s", len(batch), error)
                self._retry_or_fail(batch, error)

    def _answer_batch(self, run: Run) -> None:
        self.slowdown.observe(run.calibrated, run.seconds)
        if (answers := run.ended.result()) is None:
            return  # parts are left
        batch, started, seconds = run.batch, run.started, run.seconds
        if (progress := batch[0].progress) is not None:
            started = progress.started or started
            seconds += progress.seconds
        self._metrics.observe_run([job.tokens for job in batch], seconds)
        for job, answer in zip(batch, answers, strict=True):
            if not job.future.done():
                job.future.set_result(Result(answer, started, seconds, len(batch)))

    def _end_measurement(self, run: Run, measurement: CostMeasurement) -> None:
        """Use a measurement, or give up all further ones if it stalled."""
        match run.ended.exception():
            case None:
                pass
            case EngineThreadError() as error:
                raise error
            case RunStoppedError():
                if run.seconds > self._stall_seconds:
                    logger.warning("gave up the measurement of costs, because a run took too long")
                    measurement.abandon()
            case error:
                logger.warning("a run that measures costs failed: %s", error)
        if not self._is_current(measurement):
            return
        if measurement.is_complete:
            self.slowdown.trust_costs()
            logger.info("measured the costs of documents in %.1f s", measurement.seconds)
        elif measurement.is_done:
            logger.warning("the costs of some documents are not measured; first estimates stay")
        self._wake_waiting()

    def _is_current(self, measurement: CostMeasurement) -> bool:
        """Return whether a measurement is that of the model that answers new requests."""
        return self._turns is not None and self._turns.measurement is measurement

    def _wake_waiting(self) -> None:
        """Wake the requests that wait for a measurement."""
        self._measured.set()
        self._measured = asyncio.Event()

    def _retry_or_fail(self, batch: Sequence[Job], error: BaseException) -> None:
        """Requeue the documents of a failed batch for single runs, or fail a single document."""
        if len(batch) > 1:
            wanted = [job for job in batch if not job.future.done()]
            for job in wanted:
                job.single = True
            self._queue.requeue(wanted)
            return
        if isinstance(error, StorageError):
            self._fail(batch, error)
            return
        if not isinstance(error, EngineError):
            logger.error("the engine raised", exc_info=error)
        self._fail(batch, EngineError(f"The engine failed: {error}", "Send another document."))

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def _close(self, run: Run | None) -> None:
        self._closed = UnavailableError("The server has stopped working.", "Ask another one.")
        self._fail(self._queue.close(), self._closed)
        for begun in (run, self._run):
            self._fail(begun.batch if begun else (), self._closed)
        self._wake_waiting()
