"""Who is next at the engine, and what becomes of every run."""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from aftexport.engines import RunStoppedError
from aftexport.errors import EngineError, StorageError
from aftserve.errors import UnavailableError
from aftserve.model.active import Served
from aftserve.model.classifier import Classifier
from aftserve.model.costs import Pace
from aftserve.observability.metrics import Metrics
from aftserve.scheduling.batching import next_batch
from aftserve.scheduling.engine_thread import EngineThread, EngineThreadError, Run
from aftserve.scheduling.job import Backlog, Job, Progress, Result
from aftserve.scheduling.queue import Waiting
from aftserve.scheduling.watchdog import PARTS
from aftserve.types import Tokens

logger = logging.getLogger("aftserve.scheduler")

_STALL_FACTOR = 10
_STOP_SHARE = 0.5


class StalledError(Exception):
    """A run goes on far beyond its prediction and cannot be stopped."""


class Scheduler:
    """Answers documents, the oldest first.

    A run that fails is repeated with each of its documents alone, so that one bad document
    fails alone. A run that nobody waits for any more is stopped. Where none follows for a
    while, the engine gives the memory of its runs back.

    Args:
        budget_tokens: most tokens of a batch, padding included.
        stall_seconds: a run may be late by this and ten times its prediction.
        idle_seconds: with nothing to run for so long, the engine's memory goes back.
        metrics: what it counts.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        budget_tokens: int,
        stall_seconds: float,
        idle_seconds: float,
    ) -> None:
        self.pace = Pace()
        self._metrics = metrics
        self._budget_tokens = budget_tokens
        self._stall_seconds = stall_seconds
        self._idle_seconds = idle_seconds
        self._waiting = Waiting()
        self._running: Run | None = None
        self._keeps: Classifier | None = None  # the memory of a run
        self._closed: Exception | None = None

    @property
    def waiting_documents(self) -> int:
        """Documents that no run has taken yet."""
        return len(self._waiting)

    @property
    def running_documents(self) -> int:
        """Documents of the run that the engine is at."""
        run = self._running
        return len(run.batch) if run else 0

    @property
    def idle(self) -> bool:
        """Whether nothing runs, and the memory of what ran has gone back to the system."""
        return self._keeps is None and self._running is None

    @property
    def backlog_seconds(self) -> float:
        """Until everything accepted so far is answered, as predicted."""
        return self.wait_seconds(in_chunks=True)

    def wait_seconds(self, *, in_chunks: bool, besides: Backlog | None = None) -> float:
        """Until a document that came now would have its turn, as predicted.

        Args:
            in_chunks: it runs so, and others of the kind go first; else it goes between
                their parts.
            besides: documents that it waits for too, and that are left out.
        """
        run, waiting = self._running, self._waiting.backlog(besides)
        if run is not None and besides and all(job.request is besides for job in run.batch):
            run = None
        # A run that is late by some time may well take as long again.
        running = abs(run.started + run.predicted - time.monotonic()) if run else 0.0
        seconds = waiting.seconds
        after = run.seconds_after if run else 0.0
        if in_chunks:
            seconds += waiting.chunked_seconds + after
        else:
            # One part after each of the runs before it, at most.
            seconds += min(after, waiting.documents * (run.calibrated if run else 0.0))
        return running + seconds * self.pace.value

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While the block runs, no run begins; one that has begun goes on."""
        self._waiting.pause(True)
        try:
            yield
        finally:
            self._waiting.pause(False)

    def forget(self) -> None:
        """Another model answers from now on: what was measured of the one before is void."""
        self.pace = Pace()
        self._keeps = None

    def submit(
        self,
        served: Served,
        ids: Tokens,
        promised: float,
        *,
        alone: bool = False,
        evidence: bool = False,
        request: Backlog | None = None,
    ) -> "asyncio.Future[Result]":
        """Puts a checked document in the queue.

        Args:
            served: by whose model it is classified.
            ids: its tokens.
            promised: when it is predicted to be answered, by ``time.monotonic``.
            alone: it shares no run.
            evidence: the answer says what each token adds, in chunks too.
            request: what waits of the request that it is of; counts it too.

        Returns:
            A future of the result. Cancel it where the answer is no longer wanted; it
            raises EngineError where the engine fails on this document alone, StorageError
            where that finds no space, and UnavailableError where the scheduler ends.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        if self._closed is not None:
            future.set_exception(self._closed)
            return future
        classifier, costs = served.model.classifier, served.model.costs
        seconds = costs.alone(len(ids))
        job = Job(served, ids, seconds, promised, future, alone, request=request or Backlog())
        if classifier.in_chunks(len(ids)):
            job.progress = Progress(
                classifier.parts(ids, evidence=evidence),
                classifier.part_count(len(ids), evidence=evidence),
            )
        future.add_done_callback(lambda _: self._settled(job))
        self._waiting.put(job)
        return future

    async def serve(self) -> None:
        """Runs until it is cancelled; then, or if it fails, every waiter gets an error.

        Raises:
            StalledError: where a run neither ends nor can be stopped.
            EngineThreadError: where the engine's thread has ended.
        """
        loop = asyncio.get_running_loop()
        runs: asyncio.Queue[Run | None] = asyncio.Queue()
        EngineThread(lambda: self._next_run(loop), runs.put_nowait, lambda: runs.put_nowait(None))
        run: Run | None = None
        try:
            while (run := await runs.get()) is not None:
                await self._end_of(run)
                self._answer(run)
                run = None  # nothing of it is kept until the next one comes
            raise EngineThreadError("The engine's thread has ended.")
        finally:
            self._close(run)

    def _next_run(self, loop: asyncio.AbstractEventLoop) -> Run | None:
        """Waits for documents, or long enough in vain, and begins a run; on the engine's thread."""

        last = self._running
        others_turn = last is not None and last.unfinished

        def choose(jobs: Iterable[Job]) -> Sequence[Job]:
            if others_turn:
                jobs = [job for job in jobs if job.progress is None] or jobs
            model = next(iter(jobs)).served.model
            pads, budget, now = model.classifier.pads, self._budget_tokens, time.monotonic()
            batch = next_batch(jobs, model.costs, budget_tokens=budget, pads=pads, now=now)
            calibrated = sum(job.seconds for job in batch)
            longest = max(job.tokens for job in batch)
            together = model.costs.together(len(batch), longest)
            if (progress := batch[0].progress) is not None:
                calibrated = together = batch[0].seconds / progress.left
            predicted = together * self.pace.value
            # Before they leave the queue: whoever gives one up finds it here or there.
            self._running = Run(
                batch, model.classifier, calibrated, predicted, loop.create_future()
            )
            self._keeps = model.classifier
            return batch

        if last is not None and last.unfinished:
            self._go_on_later(last)
        self._running = last = None
        # Read again after the wait: another model may answer by now.
        if (
            self._keeps is not None
            and not self._waiting.come(self._idle_seconds)
            and (keeps := self._keeps) is not None
        ):
            self._running = Run((), keeps, 0.0, 0.0, loop.create_future())
            self._keeps = None
            return self._running
        return self._running if self._waiting.take(choose) else None

    def _go_on_later(self, run: Run) -> None:
        """After one part of a document, another has its turn; on the engine's thread."""
        (job,) = run.batch
        assert job.progress is not None  # of parts alone more is to come
        job.progress.started = job.progress.started or run.started
        job.progress.seconds += run.seconds
        job.seconds = max(0.0, job.seconds - run.calibrated)
        self._waiting.put_back([job])
        # Asked only now: whoever leaves later finds the job waiting, in _settled.
        if job.future.done() and self._waiting.remove(job):
            self._drop(job.progress)

    def _settled(self, job: Job) -> None:
        """Drops a job that was cancelled, or stops its run if nobody else waits for it."""
        if not job.future.cancelled():
            job.future.exception()  # a request that failed by another document asks for none
            return
        if self._waiting.remove(job):
            if job.progress is not None:
                self._drop(job.progress)
            return
        run = self._running  # not read before: until now the engine's thread may take the job
        if run is not None and job in run.batch and all(other.future.done() for other in run.batch):
            run.stop.request()

    def _drop(self, progress: Progress) -> None:
        """Leaves the parts of a document that are to come: nobody waits for it any more."""
        progress.parts.close()
        if progress.started:
            self._metrics.stopped_runs.inc()

    def _answer(self, run: Run) -> None:
        batch = run.batch
        match run.ended.exception():
            case None if not batch:
                pass  # memory was given back
            case None:
                self.pace.observe(run.calibrated, run.seconds)
                if (answers := run.ended.result()) is None:
                    return
                started, seconds = run.started, run.seconds
                if (progress := batch[0].progress) is not None:
                    started = progress.started or started
                    seconds += progress.seconds
                self._metrics.observe_run([job.tokens for job in batch], seconds)
                for job, answer in zip(batch, answers, strict=True):
                    if not job.future.done():
                        job.future.set_result(Result(answer, started, seconds, len(batch)))
            case EngineThreadError() as error:
                raise error
            case RunStoppedError():
                self._metrics.stopped_runs.inc()
                self._fail(batch, EngineError("The run took far too long.", "Try again later."))
            case error:
                self._metrics.failed_runs.inc()
                logger.warning("a run of %d documents failed: %s", len(batch), error)
                self._repeat_or_fail(batch, error)

    async def _end_of(self, run: Run) -> None:
        """Waits for a run, and stops one that makes no progress."""
        await _wait(run, self._stall_seconds + _STALL_FACTOR * run.predicted)
        if not run.ended.done():
            logger.error("a run predicted to take %.3f s does not end", run.predicted)
            run.stop.request()
            await _wait(run, _STOP_SHARE * self._stall_seconds)
        if not run.ended.done():
            raise StalledError("A run of the engine does not end and cannot be stopped.")

    def _repeat_or_fail(self, batch: Sequence[Job], error: BaseException) -> None:
        """Puts the documents of a failed batch back, each for itself; a single one has failed."""
        if len(batch) == 1:
            if isinstance(error, StorageError):
                self._fail(batch, error)
                return
            if not isinstance(error, EngineError):
                logger.error("the engine raised", exc_info=error)
            reason = EngineError(f"The engine failed: {error}", "Send another document.")
            self._fail(batch, reason)
            return
        wanted = [job for job in batch if not job.future.done()]
        for job in wanted:
            job.alone = True
        self._waiting.put_back(wanted)

    def _fail(self, jobs: Iterable[Job], error: Exception) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def _close(self, run: Run | None) -> None:
        self._closed = UnavailableError("The server has stopped working.", "Ask another one.")
        self._fail(self._waiting.close(), self._closed)
        for begun in (run, self._running):
            self._fail(begun.batch if begun else (), self._closed)


async def _wait(run: Run, seconds: float) -> None:
    for _ in range(PARTS):
        if not run.ended.done():
            await asyncio.wait({run.ended}, timeout=seconds / PARTS)
