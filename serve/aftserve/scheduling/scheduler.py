"""The engine's thread, the order of its runs, the predicted wait for one, and their outcomes."""

import asyncio
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from aftexport.engines import RunStoppedError
from aftexport.errors import EngineError, StorageError
from aftserve.errors import UnavailableError
from aftserve.model.answers import Answer
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.scheduling.batching import (
    Backlog,
    Idle,
    Job,
    Measuring,
    Releasing,
    Result,
    Run,
    Running,
    document_run,
    make_progress,
)
from aftserve.scheduling.queue import JobQueue, run_of
from aftserve.scheduling.watchdog import PARTS

logger = logging.getLogger("aftserve.scheduler")

_STALL_FACTOR = 10
_STOP_SHARE = 0.5
"""Share of the allowed delay in which a run must end after the request to stop."""


class EngineThreadError(Exception):
    """The thread that runs the engine has ended."""


class EngineThread:
    """A thread that executes runs one after the other and tells the event loop.

    There is one thread, because the engine uses every core for a run. It is a daemon, because a
    run that hangs must not keep the process alive.
    """

    def __init__(
        self,
        next_run: Callable[[], Run | None],  # waits on the thread for a run; None to end
        begun: Callable[[Run], None],  # called on the event loop at the start of every run
        ended: Callable[[], None],  # called on the event loop once the thread ends
    ) -> None:
        self._next_run = next_run
        self._begun = begun
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def _work(self) -> None:
        try:
            while (run := self._next_run()) is not None:
                self._tell(self._begun, run)
                self._answer(run)
                del run  # free its documents before the wait for the next run
        finally:
            self._tell(self._ended)

    def _answer(self, run: Run) -> None:
        answers: list[Answer] | None = []
        failure: BaseException | None = EngineThreadError("The engine's thread has ended.")
        try:
            answers = run.work()
            run.unfinished = answers is None
            failure = None
        except Exception as error:
            _clear_frames(error)
            failure = error
        finally:
            run.seconds = time.monotonic() - run.started
            self._tell(_settle, run.ended, answers, failure)
            del run, failure  # the error refers to this frame, too

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the variables of an error's frames.

    They refer to the run and its model, and the run refers to the error. Such a ring would keep the
    memory of an unloaded model until the next full garbage collection.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _settle(
    ended: "asyncio.Future[list[Answer] | None]",
    answers: list[Answer] | None,
    failure: BaseException | None,
) -> None:
    if ended.done():
        return
    if failure is None:
        ended.set_result(answers)
    else:
        ended.set_exception(failure)
        ended.exception()  # mark it as read: the scheduler may have ended


class StalledError(Exception):
    """A run goes on far beyond its prediction and cannot be stopped."""


async def wait_for_end(run: Run, stall_seconds: float) -> None:
    """Wait for the end of a run; stop it if it makes no progress.

    Raises:
        StalledError: if the run neither ends nor can be stopped.
    """
    await _wait(run, stall_seconds + _STALL_FACTOR * run.predicted)
    if not run.ended.done():
        logger.error("a run predicted to take %.3f s does not end", run.predicted)
        run.stop.request()
        await _wait(run, _STOP_SHARE * stall_seconds)
    if not run.ended.done():
        raise StalledError("A run of the engine does not end and cannot be stopped.")


async def _wait(run: Run, seconds: float) -> None:
    for _ in range(PARTS):
        if not run.ended.done():
            await asyncio.wait({run.ended}, timeout=seconds / PARTS)


class Scheduler:
    """A scheduler of runs, which gives each client its share, and the oldest documents first.

    If a shared run fails, each of its documents gets a single run, so that only the bad document
    fails. A run is stopped once all its clients have left. Between documents, the costs of the
    models are measured; see ``MeasurementTurns``. After a while without jobs, or before a run of
    another model, the engine releases the memory of its runs.
    """

    def __init__(
        self,
        *,
        budget_tokens: int,  # of a batch, padding included
        stall_seconds: float,  # delay of a run, beside ten times its predicted time
        idle_seconds: float,  # without jobs, until the engine releases its memory
    ) -> None:
        self._budget_tokens = budget_tokens
        self._stall_seconds = stall_seconds
        self._idle_seconds = idle_seconds
        self._queue = JobQueue()
        self._turns = self._queue.turns
        self.predictions = Predictions(self._queue)
        self._outcomes = _RunOutcomes(self._queue)
        self._others_first = False
        self._measured: asyncio.Event = asyncio.Event()
        self._closed: Exception | None = None

    @property
    def waiting_documents(self) -> int:
        """Number of queued documents."""
        return len(self._queue)

    @property
    def running_documents(self) -> int:
        """Number of documents in the current run."""
        run = self._queue.current_run
        return len(run.batch) if run else 0

    @property
    def idle(self) -> bool:
        """Whether nothing runs and the engine has released the memory of its runs."""
        return self._queue.state == Idle(memory_of=None)

    def is_measuring(self, model: LoadedModel) -> bool:
        """Return whether further measurements of a model are to come."""
        return model in self._turns and not model.measurement.is_done

    async def wait_for_measurement(self, seconds: float) -> bool:
        """Wait for the end of a run that measures, or of a model; return False after ``seconds``.

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
    def paused(self, active: ActiveBundle) -> Iterator[None]:
        """Begin no run of a bundle within the block; a run that has begun goes on.

        Its documents wait, and those of other bundles run.
        """
        self._queue.pause(active)
        try:
            yield
        finally:
            self._queue.resume(active)

    def measure(self, model: LoadedModel) -> None:
        """Measure the costs of a model besides those of others; again has no effect."""
        if model in self._turns:
            return
        if model.measurement.is_complete:
            model.slowdown.trust_costs()
        self._queue.measure(model)

    def forget(self, model: LoadedModel) -> None:
        """Give up the measurement of a model that was replaced or unloaded, and its kept memory.

        Its accepted documents are answered.
        """
        self._queue.forget(model)
        self._wake_waiting()

    def submit(self, job: Job) -> "asyncio.Future[Result]":
        """Put a checked document in the queue, and return the future of its result.

        Cancel the future once the answer is no longer wanted.

        Raises:
            EngineError: in the future, if the engine fails on this document.
            StorageError: in the future, if a document in chunks finds no space.
            UnavailableError: in the future, if the scheduler ends.
        """
        if self._closed is not None:
            job.future.set_exception(self._closed)
            return job.future
        job.seconds = job.active.model.measurement.costs.single(job.tokens)
        job.progress = make_progress(job)
        job.future.add_done_callback(lambda _: self._settle(job))
        self._queue.put(job)
        return job.future

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
                if run.measures:
                    self._end_measurement(run)
                else:
                    self._outcomes.settle(run)
                run = None  # free its documents before the wait for the next run
            raise EngineThreadError("The engine's thread has ended.")
        finally:
            self._close(run)

    def _next_run(self, loop: asyncio.AbstractEventLoop) -> Run | None:
        """Wait for jobs on the engine's thread, and begin a run; None ends the thread."""
        self._end_run()

        def release(model: LoadedModel) -> Run:
            # A release is a run of the model's shortest document.
            shortest = model.measurement.costs.single(model.classifier.min_tokens)
            predicted = shortest * model.slowdown.value
            return Run((), model, 0.0, predicted, loop.create_future())

        if not self._queue.wait(self._idle_seconds):
            run = self._queue.begin_release(release)
            if run is not None:
                return run
        return self._queue.take(
            lambda jobs: self._make_run(jobs, loop.create_future),
            lambda model: self._turns.make_run(model, loop.create_future),
            release,
        )

    def _end_run(self) -> None:
        """End the current run. After one that left parts, other documents go first."""
        state = self._queue.state
        if not isinstance(state, Releasing):  # a release comes between it and the others
            self._others_first = isinstance(state, Running) and state.run.unfinished
        if (abandoned := self._queue.end_run()) is not None:
            self._outcomes.drop(abandoned)

    def _make_run(
        self,
        jobs: Iterable[Job],
        create_future: "Callable[[], asyncio.Future[list[Answer] | None]]",
    ) -> Run:
        """Choose the jobs of the next run."""
        if self._others_first:
            jobs = [job for job in jobs if job.progress is None] or jobs
        return document_run(jobs, self._budget_tokens, create_future())

    def _settle(self, job: Job) -> None:
        """Remove a cancelled job, or stop its run once all clients of the run have left."""
        if not job.future.cancelled():
            job.future.exception()  # mark it as read: another document may have failed the request
            return
        if self._queue.remove(job):
            self._outcomes.drop(job)
            return
        run = self._queue.current_run
        if run is not None and job in run.batch and all(other.future.done() for other in run.batch):
            run.stop.request()

    def _end_measurement(self, run: Run) -> None:
        """Use a measurement, or give up all further ones of the model if it stalled."""
        model, measurement = run.model, run.model.measurement
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
        if model not in self._turns:
            return
        if measurement.is_complete:
            model.slowdown.trust_costs()
            logger.info("measured the costs of documents in %.1f s", measurement.seconds)
        elif measurement.is_done:
            logger.warning("the costs of some documents are not measured; first estimates stay")
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Wake the requests that wait for a measurement."""
        self._measured.set()
        self._measured = asyncio.Event()

    def _close(self, run: Run | None) -> None:
        self._closed = UnavailableError("The server has stopped working.", "Ask another one.")
        self._outcomes.fail(self._queue.close(), self._closed)
        for begun in (run, self._queue.current_run):
            self._outcomes.fail(begun.batch if begun else (), self._closed)
        self._wake_waiting()


class Predictions:
    """Predictions from the queue and the current run; each model has its own slowdown."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    @property
    def backlog_seconds(self) -> float:
        """Predicted time until every accepted document is answered."""
        run = self._queue.current_run
        has_documents = len(self._queue) or (run is not None and run.batch)
        return self.wait_seconds(in_chunks=True) if has_documents else 0.0

    def wait_seconds(
        self,
        *,
        # Whether the document waits for all parts of others in chunks, or runs between them.
        in_chunks: bool,
        besides: Backlog | None = None,  # documents that are left out
        client: str = "",  # whose own documents come first, and of others their share until then
        seconds: float = math.inf,  # of the request's documents; infinite to count all work
        counts_run: bool = True,  # whether a run without documents of the client counts
    ) -> float:
        """Return the predicted time until a document that arrives now has its turn."""
        state = self._queue.state  # once, since the engine's thread may change it meanwhile
        run = run_of(state)
        if isinstance(state, Measuring) and state.yields:
            run = None  # a document that arrives stops it
        if run is not None and besides and all(job.backlog is besides for job in run.batch):
            run = None
        if run is not None and not (counts_run or any(job.client == client for job in run.batch)):
            run = None
        before, runner, after = 0.0, "", 0.0
        if run is not None:
            # A run that is late by some time is expected to take as long again.
            before = abs(run.started + run.predicted - time.monotonic())
            runner, after = run.client, run.seconds_after * run.model.slowdown.value
            if after and not in_chunks:
                # At most one part of a long document runs before each document.
                others = len(self._queue) - (besides.documents if besides else 0)
                after = min(after, others * run.calibrated * run.model.slowdown.value)
        return before + self._queue.seconds_before(
            client, seconds, besides=besides, in_chunks=in_chunks, unfinished=(runner, after)
        )


class _RunOutcomes:
    """The outcomes of runs of documents, and of releases of memory."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue

    def settle(self, run: Run) -> None:
        """Settle the jobs of a run that has ended.

        The run loses them, because the engine's thread holds it for a moment longer. Garbage that
        an unload collects meanwhile must not be reachable by their metrics.

        Raises:
            EngineThreadError: if the engine's thread has ended.
        """
        batch = run.batch
        match run.ended.exception():
            case EngineThreadError() as error:
                raise error
            case None if batch:
                self._answer_batch(run)
            case None:
                pass
            case error if not batch:
                logger.warning("the model %s did not release its memory: %s", run.model.name, error)
            case RunStoppedError():
                batch[0].metrics.stopped_runs.inc()
                self.fail(batch, EngineError("The run took far too long.", "Try again later."))
            case error:
                batch[0].metrics.failed_runs.inc()
                logger.warning("a run of %d documents failed: %s", len(batch), error)
                self._retry_or_fail(batch, error)
        if not run.unfinished:
            run.batch = ()

    def _answer_batch(self, run: Run) -> None:
        run.model.slowdown.observe(run.calibrated, run.seconds)
        if (answers := run.ended.result()) is None:
            return  # parts are left
        batch, started, seconds = run.batch, run.started, run.seconds
        if (progress := batch[0].progress) is not None:
            started = progress.started or started
            seconds += progress.seconds
        batch[0].metrics.observe_run([job.tokens for job in batch], seconds)
        for job, answer in zip(batch, answers, strict=True):
            if not job.future.done():
                job.future.set_result(Result(answer, started, seconds, len(batch)))

    def _retry_or_fail(self, batch: Sequence[Job], error: BaseException) -> None:
        """Requeue the documents of a failed batch for single runs, or fail a single document."""
        if len(batch) > 1:
            wanted = [job for job in batch if not job.future.done()]
            for job in wanted:
                job.single = True
            self._queue.requeue(wanted)
            return
        if isinstance(error, StorageError):
            self.fail(batch, error)
            return
        if not isinstance(error, EngineError):
            logger.error("the engine raised", exc_info=error)
        self.fail(batch, EngineError(f"The engine failed: {error}", "Send another document."))

    def drop(self, job: Job) -> None:
        """Give up the remaining parts of a document after its client has left."""
        if job.progress is None:
            return
        job.progress.parts.close()
        if job.progress.started:
            job.metrics.stopped_runs.inc()

    def fail(self, jobs: Iterable[Job], error: Exception) -> None:
        """Give the clients that wait for these jobs an error."""
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)
