"""The outcome of a run for its documents: answers, another try or errors."""

import logging
from collections.abc import Iterable, Sequence

from aftexport.engines import RunStoppedError
from aftexport.errors import EngineError, StorageError
from aftserve.scheduling.engine_state import Run
from aftserve.scheduling.engine_thread import EngineThreadError
from aftserve.scheduling.job import Job, Result
from aftserve.scheduling.queue import JobQueue

logger = logging.getLogger("aftserve.scheduler")


class RunOutcomes:
    """The outcomes of runs of documents, and of releases of memory.

    Args:
        queue: queue that gets the documents of a failed batch again.
    """

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
        self._settle(run, batch)
        if not run.unfinished:
            run.batch = ()

    def _settle(self, run: Run, batch: Sequence[Job]) -> None:
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
