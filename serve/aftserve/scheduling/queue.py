"""The queue of documents, and the engine's state behind the same lock."""

import threading
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

from aftserve.model.active import ActiveBundle
from aftserve.model.load import LoadedModel
from aftserve.scheduling.client_turns import ClientTurns
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
from aftserve.scheduling.release_times import ReleaseTimes
from aftserve.scheduling.tenure import Tenure


class JobQueue:
    """The queue that the event loop fills and the engine's thread empties.

    The thread takes jobs itself. If it had to ask the event loop, the engine would stand still
    while the loop is busy with other requests.

    The lock covers the engine's state too: every job is in the queue, in the current run or
    settled, and no other thread ever sees it in between.

    The clients share the engine's time; see ``ClientTurns``. The documents of one client run in the
    order of their arrival.

    The models share one memory budget. Before a run of another model, the engine that keeps memory
    of its last run releases it; see ``Tenure``.

    Args:
        turns: turns of measurements beside the documents.

    Attributes:
        release_times: predicted times of the releases.
    """

    def __init__(self, turns: MeasurementTurns) -> None:
        self._jobs = ClientTurns()
        self._backlog = Backlog()
        self._changed = threading.Condition()
        self._paused = list[ActiveBundle]()
        self._closed = False
        self._state: EngineState = Idle()
        self._turns = turns
        self._tenure = Tenure()
        self._forgotten = WeakSet[LoadedModel]()
        self.release_times = ReleaseTimes()

    def __len__(self) -> int:
        """Number of queued documents."""
        return len(self._jobs)

    @property
    def state(self) -> EngineState:
        """The engine's current state."""
        return self._state

    @property
    def current_run(self) -> Run | None:
        """The current run; None once its documents are answered.

        The engine's thread may note the end later than a client sends its next request.
        """
        state = self._state
        if isinstance(state, Idle):
            return None
        run = state.run
        is_over = not run.unfinished and run.ended.done()
        return None if is_over else run

    def backlog(self, besides: Backlog | None = None) -> Backlog:
        """Return the queued documents, without the documents of the backlog ``besides``."""
        with self._changed:
            return self._backlog - (besides or Backlog())

    def seconds_before(
        self,
        client: str,
        seconds: float,
        *,
        besides: Backlog | None,
        in_chunks: bool,
        unfinished: tuple[str, float],
    ) -> float:
        """Return the predicted time of the jobs before a request; see ``ClientTurns``."""
        with self._changed:
            return self._jobs.seconds_before(
                client, seconds, besides=besides, in_chunks=in_chunks, unfinished=unfinished
            )

    def put(self, job: Job) -> None:
        """Add a job after the others of its client."""
        with self._changed:
            self._jobs.append(job)
            self._count(job, 1)
            if isinstance(self._state, Measuring) and self._state.yields:
                self._state.run.stop.request()
            self._changed.notify()

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Put jobs before the others of their clients, in their order."""
        with self._changed:
            self._jobs.prepend(jobs)
            for job in jobs:
                self._count(job, 1)
            self._changed.notify()

    def remove(self, job: Job) -> bool:
        """Remove a job; return False if it is no longer in the queue."""
        with self._changed:
            if not self._jobs.remove(job):
                return False
            self._count(job, -1)
            self._forget_memory()
            return True

    def wait(self, seconds: float) -> bool:
        """Wait for jobs, measurements or the end of the queue.

        Returns:
            False after ``seconds`` without any of them.
        """
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or bool(self._jobs) or self._to_measure() is not None,
                min(seconds, threading.TIMEOUT_MAX),
            )

    def take(
        self,
        choose: Callable[[Iterable[Job]], Run],
        measure: Callable[[LoadedModel], Run],
        release: Callable[[LoadedModel], Run],
    ) -> Run | None:
        """Wait for jobs or measurements, and begin a run.

        Args:
            choose: function that returns a run of some of the jobs.
            measure: function that returns the run of a model's next measurement.
            release: function that returns a run that releases the memory of a model's engine.

        Returns:
            The run; None once the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._has_jobs() or self._to_measure() is not None
            )
            if self._closed:
                return None
            model, holder = self._to_measure(), self._memory_holder
            release_seconds = self._release_before(model, holder) if model else 0.0
            is_due = model is not None and self._turns.is_due(model, release_seconds)
            if model is not None and (is_due or not self._has_jobs()):
                run = measure(model)
            else:
                run = choose(self._first_jobs())
            if holder is not None and holder is not run.model:
                self._state = Releasing(release(holder), for_measurement=run.measures and is_due)
                return self._state.run
            if run.batch:
                self._jobs.begin(run.batch)
            for job in run.batch:
                self._count(job, -1)
            self._forget_memory()
            self._state = Measuring(run, yields=not is_due) if run.measures else Running(run)
            return run

    def begin_release(self, release: Callable[[LoadedModel], Run]) -> Run | None:
        """Begin a run that releases memory; return None if no engine keeps memory."""
        with self._changed:
            holder = self._memory_holder
            if holder is None:
                return None
            run = release(holder)
            self._state = Releasing(run)
            return run

    def end_run(self) -> Job | None:
        """End the current run; a document with parts left goes before others of its client.

        Returns:
            The document with parts left if its client has gone; it is not queued again.
        """
        with self._changed:
            state, self._state = self._state, Idle()
            abandoned = None
            match state:
                case Running(run):
                    self._state = Idle(run.model)
                    self._tenure.spend(run.seconds)
                    abandoned = self._requeue_rest(run) if run.unfinished else None
                case Releasing(run, for_measurement):
                    self._tenure.begin(run.seconds)
                    self.release_times.observe(run.model, run.seconds)
                    if for_measurement:
                        self._turns.add_release(run.seconds)
                case Measuring(run):
                    self._state = Idle(run.model)
                    self._turns.end_run(run.model)
            self._forget_memory()
            return abandoned

    def measure(self, model: LoadedModel) -> None:
        """Give turns to the measurements of a model."""
        with self._changed:
            self._turns.add(model)
            self._changed.notify()

    def forget(self, model: LoadedModel) -> None:
        """Forget the measurements and the kept memory of a model that was replaced or unloaded.

        Its accepted documents still run. Until they are done, it keeps its memory as others do.
        """
        with self._changed:
            self._turns.forget(model)
            self._forgotten.add(model)
            if isinstance(self._state, Measuring) and self._state.run.model is model:
                self._state.run.stop.request()
            self._forget_memory()

    def pause(self, active: ActiveBundle) -> None:
        """Hold the jobs and measurements of a bundle back, until ``resume``."""
        with self._changed:
            self._paused.append(active)

    def resume(self, active: ActiveBundle) -> None:
        """End one ``pause`` of a bundle."""
        with self._changed:
            self._paused.remove(active)
            self._changed.notify()

    def close(self) -> list[Job]:
        """End every call of ``take``; return the remaining jobs."""
        with self._changed:
            self._closed = True
            left = self._jobs.clear()
            self._backlog = Backlog()
            self._changed.notify()
            return left

    @property
    def _memory_holder(self) -> LoadedModel | None:
        """The model whose engine keeps the memory of its last run while nothing runs."""
        return self._state.memory_of if isinstance(self._state, Idle) else None

    def release_seconds(self, model: LoadedModel) -> float:
        """Return the predicted time of the release before a document of a model that comes now."""
        with self._changed:
            if isinstance(self._state, Running | Measuring):
                return self._release_before(model, self._state.run.model)
            return self._release_before(model, self._memory_holder)

    def _to_measure(self) -> LoadedModel | None:
        """Return the model whose measurement has its turn; None without any."""
        return self._turns.next({active.model for active in self._paused})

    def _release_before(self, model: LoadedModel, holder: LoadedModel | None) -> float:
        """Return the predicted time of the release before a run of a model, after another."""
        if holder is None or holder is model:
            return 0.0
        return self.release_times.predict(holder)

    def _has_jobs(self) -> bool:
        """Return whether there are jobs that may run."""
        if not self._paused:
            return bool(self._jobs)
        return any(job.active not in self._paused for job in self._jobs)

    def _first_jobs(self) -> Iterable[Job]:
        """Return the jobs that may run next, in the order of their clients' turns."""
        jobs: Iterable[Job] = self._jobs
        if self._paused:
            jobs = [job for job in jobs if job.active not in self._paused]
        holder = self._memory_holder
        if holder is None or self._tenure.is_over:
            return jobs
        own = [job for job in jobs if job.active.model is holder]
        other = next((job for job in jobs if job.active.model is not holder), None)
        if own and other is not None and self._tenure.may_end:
            before = own[0].predicted_seconds + self.release_times.predict(holder)
            return jobs if other.misses_promise(before) else own
        return own or jobs

    def _requeue_rest(self, run: Run) -> Job | None:
        """Requeue a document with parts left; return it instead if its client has gone."""
        job = run.count_part()
        if job.future.done():
            return job
        self.requeue([job])
        return None

    def _forget_memory(self) -> None:
        """Forget the memory of a forgotten model once its last document is done."""
        match self._state:
            case Idle(LoadedModel() as holder) if holder in self._forgotten:
                if all(active.model is not holder for active in self._backlog.bundles):
                    self._state = Idle()

    def _count(self, job: Job, sign: int) -> None:
        self._backlog.count(job, sign)
        job.backlog.count(job, sign)
