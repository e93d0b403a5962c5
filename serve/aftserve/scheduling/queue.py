"""The queue of documents, the turns of clients and of measurements, and the engine's state."""

import asyncio
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from weakref import WeakSet

from aftserve.model.answers import Answer
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.scheduling.batching import (
    Backlog,
    EngineState,
    Idle,
    Job,
    Measuring,
    Releasing,
    Run,
    Running,
)

_SHARE = 0.1
"""Maximum share of the engine's time for measurements while documents wait."""


class MeasurementTurns:
    """The measurements of the models' costs while the server answers documents.

    Without documents in the queue, a measurement runs at once, and a document that arrives stops
    it. A server whose gaps between documents are short would never measure anything, and then never
    run batches. A measurement is therefore due once all of them take at most a tenth of the time.
    It then runs even if documents wait, and a document that arrives does not stop it.

    Only complete runs count against the tenth. Otherwise stopped runs in short gaps would use it
    up, and no measurement would ever be due. The stopped runs end with the measurements, which take
    at most ten times the predicted time of all complete ones.

    The tenth belongs to all models together, which take turns: after each run, the next model
    measures. While documents wait, the first model whose measurement is due has its turn, so that
    a long measurement delays only itself.
    """

    def __init__(self) -> None:
        # Replaced as a whole, because the event loop reads it while the engine's thread changes it.
        self._models: tuple[LoadedModel, ...] = ()
        self._since = self._now()
        self._spent = 0.0
        self._seconds_before = 0.0

    def __contains__(self, model: LoadedModel) -> bool:
        """Whether the model has turns, or its measurement is done."""
        return model in self._models

    def add(self, model: LoadedModel) -> None:
        """Give turns to a model."""
        if self.next() is None:  # the time without measurements must not count for later ones
            self._since, self._spent = self._now(), 0.0
        self._models = (*self._models, model)

    def forget(self, model: LoadedModel) -> None:
        """Give no further turns to a model."""
        self._models = tuple(one for one in self._models if one is not model)

    def next(self, held: Container[LoadedModel] = ()) -> LoadedModel | None:
        """Return the first model that is due, or else the first; None without measurements."""
        left = [one for one in self._models if not one.measurement.is_done and one not in held]
        return next(filter(self.is_due, left), left[0] if left else None)

    def is_due(self, model: LoadedModel) -> bool:
        """Return whether the model's next measurement may run although documents wait."""
        left = _SHARE * (self._now() - self._since) - self._spent
        return left >= model.measurement.next_seconds

    def make_run(
        self,
        model: LoadedModel,
        create_future: "Callable[[], asyncio.Future[list[Answer] | None]]",
    ) -> Run:
        """Return a run of the model's next measurement."""
        self._seconds_before = model.measurement.seconds
        seconds = model.measurement.next_seconds
        return Run((), model, 0.0, seconds, create_future(), measures=True)

    def end_run(self, model: LoadedModel) -> None:
        """End the run of a measurement, also of one that was stopped; the next model follows."""
        self._spent += model.measurement.seconds - self._seconds_before
        if model in self:
            self.forget(model)
            self._models = (*self._models, model)

    def _now(self) -> float:
        return time.monotonic()


_NOTHING = Backlog()
_TENURE_RELEASES = 10
"""Seconds of a model's runs before older documents of others, for each second of its release."""
_MAX_TENURE_SECONDS = 0.5


def run_of(state: EngineState) -> Run | None:
    """Return the run of a state; None once its documents are answered.

    The engine's thread may note the end later than a client sends its next request.
    """
    if isinstance(state, Idle):
        return None
    run = state.run
    is_over = not run.unfinished and run.ended.done()
    return None if is_over else run


class JobQueue:
    """The queue that the event loop fills and the engine's thread empties.

    The thread takes jobs itself. If it had to ask the event loop, the engine would stand still
    while the loop is busy with other requests.

    The lock covers the engine's state too: every job is in the queue, in the current run or
    settled, and no other thread ever sees it in between.

    The clients share the engine's time; see ``ClientTurns``. The documents of one client run in the
    order of their arrival.

    The models share one memory budget. Before a run of another model, the engine that keeps memory
    of its last run releases it, by a run of its shortest document. That takes 0.1 ms for a tiny
    model and 3 ms for one of 6 layers of width 256: more than runs of few tokens. Documents of the
    model that ran last therefore go before older ones of others, until their runs have taken ten
    times as long as the last release, and for half a second at most.
    """

    def __init__(self) -> None:
        self._jobs = ClientTurns()
        self._backlog = Backlog()
        self._changed = threading.Condition()
        self._paused = list[ActiveBundle]()
        self._closed = False
        self._state: EngineState = Idle()
        self._tenure_left = 0.0
        self._forgotten = WeakSet[LoadedModel]()
        self.turns = MeasurementTurns()

    def __len__(self) -> int:
        """Number of queued documents."""
        with self._changed:  # the engine's thread may remove a client meanwhile
            return len(self._jobs)

    @property
    def state(self) -> EngineState:
        """The engine's current state."""
        return self._state

    @property
    def current_run(self) -> Run | None:
        """The current run; see ``run_of``."""
        return run_of(self._state)

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
        """Wait for jobs, measurements or the end; return False after ``seconds`` without any."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or bool(self._jobs) or self._to_measure() is not None,
                min(seconds, threading.TIMEOUT_MAX),
            )

    def take(
        self,
        choose: Callable[[Iterable[Job]], Run],  # a run of some of the jobs
        measure: Callable[[LoadedModel], Run],  # the run of a model's next measurement
        release: Callable[[LoadedModel], Run],  # a run that releases the memory of a model's engine
    ) -> Run | None:
        """Wait for jobs or measurements, and begin a run; return None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._has_jobs() or self._to_measure() is not None
            )
            if self._closed:
                return None
            model, holder = self._to_measure(), self._memory_holder
            is_due = model is not None and self.turns.is_due(model)
            if model is not None and (is_due or not self._has_jobs()):
                run = measure(model)
            else:
                run = choose(self._first_jobs())
            if holder is not None and holder is not run.model:
                self._state = Releasing(release(holder))
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

        If the client has gone, the document is returned instead.
        """
        with self._changed:
            state, self._state = self._state, Idle()
            abandoned = None
            match state:
                case Running(run):
                    self._state = Idle(run.model)
                    self._tenure_left -= run.seconds
                    abandoned = self._requeue_rest(run) if run.unfinished else None
                case Releasing(run):
                    self._tenure_left = min(_TENURE_RELEASES * run.seconds, _MAX_TENURE_SECONDS)
                case Measuring(run):
                    self._state = Idle(run.model)
                    self.turns.end_run(run.model)
            self._forget_memory()
            return abandoned

    def measure(self, model: LoadedModel) -> None:
        """Give turns to the measurements of a model."""
        with self._changed:
            self.turns.add(model)
            self._changed.notify()

    def forget(self, model: LoadedModel) -> None:
        """Forget the measurements and the kept memory of a model that was replaced or unloaded.

        Its accepted documents still run. Until they are done, it keeps its memory as others do.
        """
        with self._changed:
            self.turns.forget(model)
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

    def _to_measure(self) -> LoadedModel | None:
        """Return the model whose measurement has its turn; None without any."""
        return self.turns.next({active.model for active in self._paused})

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
        if holder is None or self._tenure_left <= 0.0:
            return jobs
        return [job for job in jobs if job.active.model is holder] or jobs

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


@dataclass(eq=False)
class _ClientJobs:
    """The queued documents of one client."""

    start: float  # virtual: seconds of work of each busy client before the first document
    jobs: deque[Job] = field(default_factory=deque)  # the oldest first
    backlog: Backlog = field(default_factory=Backlog)

    def finishes(self) -> Iterator[tuple[float, Job]]:
        """Yield each document with its virtual finish."""
        finish = self.start
        for job in self.jobs:
            finish += job.turn_seconds
            yield finish, job


class ClientTurns:
    """Queued documents in the order of self-clocked fair queueing (Golestani, 1994).

    A document's virtual finish is that of the client's document before it, plus its own predicted
    seconds. The document with the least virtual finish is next. So the documents of a client keep
    their order, and busy clients get equal seconds of the engine, however many documents or
    connections each has. A client that was idle begins at the virtual finish of the last document
    that began to run: it neither saves up time nor pays for time that was free.

    A document in chunks counts by its next part, so that clients have turns between parts. Clients
    without queued documents are forgotten, unless the documents of a shared run put them ahead.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _ClientJobs] = {}
        self._ahead: dict[str, float] = {}  # virtual starts of clients without queued documents
        self._now = 0.0

    def __iter__(self) -> Iterator[Job]:
        """The documents in the order of their turns; equal ones by the client that came first."""
        streams = [one.finishes() for one in self._clients.values()]
        return (job for _, job in heapq.merge(*streams, key=itemgetter(0)))

    def __len__(self) -> int:
        """Number of documents."""
        return sum(len(one.jobs) for one in self._clients.values())

    def __bool__(self) -> bool:
        """Whether there are documents."""
        return bool(self._clients)

    def append(self, job: Job) -> None:
        """Add a document after the others of its client."""
        one = self._of(job)
        one.jobs.append(job)
        one.backlog.count(job, 1)

    def prepend(self, jobs: Sequence[Job]) -> None:
        """Add documents before the others of their clients, in their order."""
        for job in reversed(jobs):
            one = self._of(job)
            one.jobs.appendleft(job)
            one.backlog.count(job, 1)

    def remove(self, job: Job) -> bool:
        """Remove a document; return False if it is not queued."""
        one = self._clients.get(job.client)
        if one is None or job not in one.jobs:
            return False
        one.jobs.remove(job)
        one.backlog.count(job, -1)
        if not one.jobs:
            self._ahead[job.client] = self._clients.pop(job.client).start
        return True

    def begin(self, batch: Sequence[Job]) -> None:
        """Remove the documents of a run, whose clients use up their turns."""
        self._now = max(self._now, min(next(one.finishes())[0] for one in self._clients.values()))
        for job in batch:
            self._clients[job.client].start += job.turn_seconds
            self.remove(job)
        self._ahead = {name: start for name, start in self._ahead.items() if start > self._now}

    def seconds_before(
        self,
        client: str,
        seconds: float = math.inf,  # of its documents; infinite to count all queued ones
        *,
        besides: Backlog | None = None,  # documents of the client that are left out
        in_chunks: bool,
        # Client and predicted time of the remaining parts of the document that runs.
        unfinished: tuple[str, float] = ("", 0.0),
    ) -> float:
        """Return the predicted time of the documents that come before those of a request."""
        runner, left = unfinished
        own = self._clients.get(client)
        before = left if runner == client else 0.0
        finish = (own.start if own else self._next_start(client)) + before + seconds
        if own is not None:
            finish += own.backlog.seconds_without(_NOTHING, in_chunks=in_chunks)
            before += own.backlog.seconds_without(besides or _NOTHING, in_chunks=in_chunks)
        if runner not in (client, *self._clients):
            before += min(left, max(0.0, finish - self._now))
        for name, other in self._clients.items():
            if name != client:
                most = other.backlog.seconds_without(_NOTHING, in_chunks=in_chunks)
                most += left if name == runner else 0.0
                before += min(most, max(0.0, finish - other.start))
        return before

    def clear(self) -> list[Job]:
        """Remove and return all documents."""
        jobs = list(self)
        self._clients.clear()
        return jobs

    def _of(self, job: Job) -> _ClientJobs:
        if not self._clients:
            # The virtual time of busy servers would lose its small digits.
            self._now, self._ahead = 0.0, {}
        if job.client not in self._clients:
            self._clients[job.client] = _ClientJobs(self._next_start(job.client))
        return self._clients[job.client]

    def _next_start(self, client: str) -> float:
        """Return the virtual start of a client without queued documents."""
        return max(self._now, self._ahead.get(client, 0.0))
