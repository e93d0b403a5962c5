"""Who is next at the engine: one queue, one loop that waits for events, one engine thread."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from aftexport.engines import RunStoppedError, Stop
from aftexport.errors import EngineError
from aftserve.batching import Job, Result, next_batch
from aftserve.calibration import Costs
from aftserve.classifier import Answer, Classifier, Tokens
from aftserve.engine_thread import EngineThread, EngineThreadError
from aftserve.errors import UnavailableError
from aftserve.metrics import Metrics
from aftserve.pace import Pace
from aftserve.watchdog import PARTS

logger = logging.getLogger(__name__)

_STALL_FACTOR = 10
_STOP_SHARE = 0.5


class StalledError(Exception):
    """A run goes on far beyond its prediction and cannot be stopped."""


class Scheduler:
    """Answers documents, the oldest first.

    A run that fails is repeated with each of its documents alone, so that one bad document
    fails alone. A run that nobody waits for any more is stopped.

    Args:
        classifier: of checked documents.
        costs: of its runs.
        budget_tokens: most tokens of a batch, padding included.
        stall_seconds: a run may be late by this and ten times its prediction.
        metrics: what it counts.

    Attributes:
        engine_free: held during a run; whoever holds it has the engine to itself.
    """

    def __init__(
        self,
        classifier: Classifier,
        costs: Costs,
        metrics: Metrics,
        *,
        budget_tokens: int,
        stall_seconds: float,
    ) -> None:
        self.costs = costs
        self.pace = Pace()
        self._classifier = classifier
        self._metrics = metrics
        self._budget_tokens = budget_tokens
        self._stall_seconds = stall_seconds
        self._waiting: deque[Job] = deque()
        self._waiting_seconds = 0.0
        self._running: Sequence[Job] = ()
        self._running_until = 0.0
        self._stop = Stop()
        self._arrival = asyncio.Event()
        self.engine_free = asyncio.Lock()
        self._closed: Exception | None = None

    @property
    def waiting_documents(self) -> int:
        """Documents that no run has taken yet."""
        return len(self._waiting)

    @property
    def running_documents(self) -> int:
        """Documents of the run that the engine is at."""
        return len(self._running)

    @property
    def backlog_seconds(self) -> float:
        """Until everything accepted so far is answered, as predicted."""
        # A run that is late by some time may well take as long again.
        running = abs(self._running_until - time.monotonic()) if self._running else 0.0
        return running + self._waiting_seconds * self.pace.value

    def use(self, classifier: Classifier, costs: Costs) -> None:
        """Runs another model from now on; for whoever holds ``engine_free``."""
        self._classifier, self.costs, self.pace = classifier, costs, Pace()

    def submit(
        self, ids: Tokens, promised: float, *, alone: bool = False
    ) -> "asyncio.Future[Result]":
        """Puts a checked document in the queue.

        Args:
            ids: its tokens.
            promised: when it is predicted to be answered, by ``time.monotonic``.
            alone: it shares no run.

        Returns:
            A future of the result. Cancel it where the answer is no longer wanted; it
            raises EngineError where the engine fails on this document alone, and
            UnavailableError where the scheduler ends.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        job = Job(ids, self.costs.alone(len(ids)), promised, future, alone)
        if self._closed is not None:
            future.set_exception(self._closed)
            return future
        future.add_done_callback(lambda _: self._settled(job))
        self._enqueue(job)
        return future

    async def serve(self) -> None:
        """Runs until it is cancelled; then, or if it fails, every waiter gets an error.

        Raises:
            StalledError: where a run neither ends nor can be stopped.
            EngineThreadError: where the engine's thread has ended.
        """
        thread = EngineThread()
        try:
            while True:
                await self._arrival.wait()
                async with self.engine_free:
                    if batch := self._take():
                        await self._run(batch, thread)
        finally:
            thread.close()
            self._close()

    def _enqueue(self, job: Job, *, first: bool = False) -> None:
        (self._waiting.appendleft if first else self._waiting.append)(job)
        self._waiting_seconds += job.seconds
        self._arrival.set()

    def _remove(self, job: Job) -> None:
        self._waiting.remove(job)
        # Rounding must not add up over the life of the process.
        self._waiting_seconds = self._waiting_seconds - job.seconds if self._waiting else 0.0

    def _settled(self, job: Job) -> None:
        """Drops a job that was cancelled, or stops its run if nobody else waits for it."""
        if not job.future.cancelled():
            job.future.exception()  # a request that failed by another document asks for none
            return
        if job in self._running:
            if all(other.future.done() for other in self._running):
                self._stop.request()
        elif job in self._waiting:
            self._remove(job)

    def _take(self) -> list[Job]:
        if not self._waiting:
            self._arrival.clear()
            return []
        batch = next_batch(
            self._waiting,
            self.costs,
            budget_tokens=self._budget_tokens,
            pads=self._classifier.pads,
            now=time.monotonic(),
        )
        for job in batch:
            self._remove(job)
        return batch

    async def _run(self, batch: Sequence[Job], thread: EngineThread) -> None:
        longest = max(job.tokens for job in batch)
        predicted = self.costs.together(len(batch), longest) * self.pace.value
        started = time.monotonic()
        self._running, self._stop, self._running_until = batch, Stop(), started + predicted
        documents, stop = [job.ids for job in batch], self._stop
        run = thread.submit(lambda: self._classifier.classify(documents, stop))
        await self._end_of(run, predicted)
        seconds = time.monotonic() - started
        match run.exception():
            case None:
                self.pace.observe(sum(job.seconds for job in batch), seconds)
                self._metrics.observe_run([job.tokens for job in batch], longest, seconds)
                for job, answer in zip(batch, run.result(), strict=True):
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
        # Not before: what is running when an error gets out of here is failed by _close.
        self._running = ()

    async def _end_of(self, run: "asyncio.Future[list[Answer]]", predicted: float) -> None:
        """Waits for a run, and stops one that makes no progress."""
        await _wait(run, self._stall_seconds + _STALL_FACTOR * predicted)
        if not run.done():
            logger.error("a run predicted to take %.3f s does not end; stopping it", predicted)
            self._stop.request()
            await _wait(run, _STOP_SHARE * self._stall_seconds)
        if not run.done():
            raise StalledError("A run of the engine does not end and cannot be stopped.")

    def _repeat_or_fail(self, batch: Sequence[Job], error: BaseException) -> None:
        """Puts the documents of a failed batch back, each for itself; a single one has failed."""
        if len(batch) == 1:
            if not isinstance(error, EngineError):
                logger.error("the engine raised", exc_info=error)
            reason = EngineError(f"The engine failed: {error}", "Send another document.")
            self._fail(batch, reason)
            return
        for job in reversed(batch):
            if not job.future.done():
                job.alone = True
                self._enqueue(job, first=True)

    def _fail(self, jobs: Sequence[Job], error: Exception) -> None:
        for job in jobs:
            if not job.future.done():
                job.future.set_exception(error)

    def _close(self) -> None:
        self._closed = UnavailableError("The server has stopped working.", "Ask another one.")
        jobs = [*self._running, *self._waiting]
        self._waiting.clear()
        self._waiting_seconds = 0.0
        self._fail(jobs, self._closed)


async def _wait(run: "asyncio.Future[list[Answer]]", seconds: float) -> None:
    for _ in range(PARTS):
        if not run.done():
            await asyncio.wait({run}, timeout=seconds / PARTS)
