"""The documents that wait for the engine."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from aftserve.scheduling.job import Backlog, Job


class Waiting:
    """The queue between the event loop, which fills it, and the engine's thread.

    The thread takes for itself: had it to ask the loop, the engine would stand still for as
    long as the loop is at other requests.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._backlog = Backlog()
        self._changed = threading.Condition()
        self._paused = self._closed = False

    def __len__(self) -> int:
        """Documents."""
        return len(self._jobs)

    def backlog(self, besides: Backlog | None = None) -> Backlog:
        """What waits; of a request's backlog ``besides``, what waits but for that."""
        with self._changed:
            return self._backlog - (besides or Backlog())

    def put(self, job: Job) -> None:
        """Adds a job as the last."""
        with self._changed:
            self._jobs.append(job)
            self._count(job, 1)
            self._changed.notify()

    def put_back(self, jobs: Sequence[Job]) -> None:
        """Puts jobs before all others, in their order."""
        with self._changed:
            self._jobs.extendleft(reversed(jobs))
            for job in jobs:
                self._count(job, 1)
            self._changed.notify()

    def remove(self, job: Job) -> bool:
        """Drops a job; False where it was taken already."""
        with self._changed:
            if job not in self._jobs:
                return False
            self._drop(job)
            return True

    def come(self, seconds: float) -> bool:
        """Waits for jobs, or until it is closed; False where so many seconds pass before."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or bool(self._jobs), min(seconds, threading.TIMEOUT_MAX)
            )

    def take(self, choose: Callable[[Iterable[Job]], Sequence[Job]]) -> Sequence[Job]:
        """Waits for jobs and removes those that ``choose`` picks; none once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._jobs and not self._paused))
            if self._closed:
                return ()
            taken = choose(self._jobs)
            for job in taken:
                self._drop(job)
            return taken

    def pause(self, paused: bool) -> None:
        """Keeps all jobs here, or lets them go on."""
        with self._changed:
            self._paused = paused
            self._changed.notify()

    def close(self) -> list[Job]:
        """Ends every ``take``; returns the jobs that nobody took."""
        with self._changed:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._backlog = Backlog()
            self._changed.notify()
            return left

    def _drop(self, job: Job) -> None:
        self._jobs.remove(job)
        self._count(job, -1)

    def _count(self, job: Job, sign: int) -> None:
        for backlog in (self._backlog, job.request):
            backlog.documents += sign
            if job.progress is None:
                backlog.seconds += sign * job.seconds
            else:
                backlog.chunked_seconds += sign * job.seconds
            if not backlog.documents:
                # Rounding must not add up over the life of the process.
                backlog.seconds = backlog.chunked_seconds = 0.0
