"""The order of queued documents: each client gets an equal share of the engine's time."""

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from aftserve.scheduling.job import Backlog, Job

_NOTHING = Backlog()


@dataclass(eq=False)
class _ClientJobs:
    """The queued documents of one client.

    Attributes:
        start: virtual start of the first document: seconds of work of each busy client before it.
        jobs: the documents, the oldest first.
        backlog: their predicted time.
    """

    start: float
    jobs: deque[Job] = field(default_factory=deque)
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
        seconds: float = math.inf,
        *,
        besides: Backlog | None = None,
        in_chunks: bool,
        unfinished: tuple[str, float] = ("", 0.0),
    ) -> float:
        """Return the predicted time of the documents that come before those of a request.

        Args:
            client: client of the request.
            seconds: predicted time of its documents; infinite to count all queued documents.
            besides: queued documents of the client that are left out.
            in_chunks: whether its documents run in chunks; see ``Backlog.seconds_without``.
            unfinished: client and predicted time of the remaining parts of the document that runs.
        """
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
