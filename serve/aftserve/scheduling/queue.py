"""The queue of documents, and the engine's state behind the same lock."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from aftserve.model.classifier import Classifier
from aftserve.scheduling.engine_state import (
    EngineState,
    Idle,
    Measuring,
    Releasing,
    Run,
    Running,
)
from aftserve.scheduling.job import Backlog, Job
from aftserve.scheduling.measuring import MeasurementTurns


class JobQueue:
    """The queue that the event loop fills and the engine's thread empties.

    The thread takes jobs itself. If it had to ask the event loop, the engine would stand still
    while the loop is busy with other requests.

    The lock covers the engine's state too: every job is in the queue, in the current run or
    settled, and no other thread ever sees it in between.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._backlog = Backlog()
        self._changed = threading.Condition()
        self._paused = self._closed = False
        self._state: EngineState = Idle()
        self._turns: MeasurementTurns | None = None

    def __len__(self) -> int:
        """Number of queued documents."""
        return len(self._jobs)

    @property
    def state(self) -> EngineState:
        """The engine's current state."""
        return self._state

    def backlog(self, besides: Backlog | None = None) -> Backlog:
        """Return the queued documents, without the documents of the backlog ``besides``."""
        with self._changed:
            return self._backlog - (besides or Backlog())

    def put(self, job: Job) -> None:
        """Add a job at the end."""
        with self._changed:
            self._jobs.append(job)
            self._count(job, 1)
            if isinstance(self._state, Measuring) and self._state.yields:
                self._state.run.stop.request()
            self._changed.notify()

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Put jobs before all others, in their order."""
        with self._changed:
            self._jobs.extendleft(reversed(jobs))
            for job in jobs:
                self._count(job, 1)
            self._changed.notify()

    def remove(self, job: Job) -> bool:
        """Remove a job; return False if it is no longer in the queue."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._remove(job)
            return True

    def wait(self, seconds: float) -> bool:
        """Wait for jobs, measurements or the end of the queue.

        Returns:
            False after ``seconds`` without any of them.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or bool(self._jobs) or self._may_measure(),
                min(seconds, threading.TIMEOUT_MAX),
            )

    def take(
        self,
        choose: Callable[[Iterable[Job]], Run],
        measure: Callable[[MeasurementTurns], Run],
    ) -> Run | None:
        """Wait for jobs or measurements, and begin a run.

        Args:
            choose: function that returns a run of some of the jobs.
            measure: function that returns the run of a measurement.

        Returns:
            The run; None once the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._jobs and not self._paused) or self._may_measure()
            )
            if self._closed:
                return None
            turns = self._turns
            if turns is not None and self._may_measure():
                is_due = turns.is_due
                if is_due or not self._jobs:
                    run = measure(turns)
                    self._state = Measuring(run, yields=not is_due)
                    return run
            run = choose(self._jobs)
            for job in run.batch:
                self._remove(job)
            self._state = Running(run)
            return run

    def begin_release(self, make: Callable[[Classifier], Run]) -> Run | None:
        """Begin a run that releases memory, by ``make``; return None if no engine keeps memory."""
        with self._changed:
            if not isinstance(self._state, Idle) or self._state.memory_of is None:
                return None
            run = make(self._state.memory_of)
            self._state = Releasing(run)
            return run

    def end_run(self) -> Job | None:
        """End the current run; a document with parts left goes to the front of the queue.

        Returns:
            The document with parts left if its client has gone; it is not queued again.
        """
        with self._changed:
            state, self._state = self._state, Idle()
            if isinstance(state, Running | Measuring) and state.keeps_memory:
                self._state = Idle(state.run.classifier)
            if not isinstance(state, Running) or not state.run.unfinished:
                return None
            job = state.run.count_part()
            if job.future.done():
                return job
            self.requeue([job])
            return None

    def forget_memory(self) -> None:
        """Forget the engine that keeps memory, after the replacement of its model."""
        with self._changed:
            match self._state:
                case Idle():
                    self._state = Idle()
                case Running(run):
                    self._state = Running(run, keeps_memory=False)
                case Measuring(run, yields):
                    self._state = Measuring(run, yields, keeps_memory=False)

    def measure(self, turns: MeasurementTurns) -> None:
        """Give turns to the measurements of a model instead of earlier ones."""
        with self._changed:
            self._turns = turns
            if isinstance(self._state, Measuring):
                self._state.run.stop.request()
            self._changed.notify()

    def pause(self, paused: bool) -> None:
        """Hold all jobs back, or release them."""
        with self._changed:
            self._paused = paused
            self._changed.notify()

    def close(self) -> list[Job]:
        """End every call of ``take``; return the remaining jobs."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._backlog = Backlog()
            self._changed.notify()
            return left

    def _may_measure(self) -> bool:
        return not self._paused and self._turns is not None and not self._turns.measurement.is_done

    def _remove(self, job: Job) -> None:
        self._jobs.remove(job)
        self._count(job, -1)

    def _count(self, job: Job, sign: int) -> None:
        for backlog in (self._backlog, job.backlog):
            backlog.documents += sign
            if job.progress is None:
                backlog.seconds += sign * job.seconds
            else:
                backlog.chunked_seconds += sign * job.seconds
            if not backlog.documents:
                # Rounding errors must not add up over the life of the process.
                backlog.seconds = backlog.chunked_seconds = 0.0
