"""Counts and times of inference since the start of the server, as Triton's statistics have them."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class TotalTime:
    """A number of events, and the sum of their times.

    Attributes:
        count: number of events.
        seconds: sum of their times.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count an event."""
        self.count += 1
        self.seconds += seconds


@dataclass
class InferenceStats:
    """Requests and runs, of every interface of the server.

    Attributes:
        last_request: Unix time of the last request that was answered or failed; 0 before it.
        documents: number of answered documents.
        answered: requests that were answered, and their times from tokenization on.
        failed: requests that were refused by the queue, failed in the engine, or were given up.
        queue, tokenize, run, finish: stages of the answered requests, each by its longest document.
        runs: runs of the engine by their number of documents.
    """

    last_request: float = 0.0
    documents: int = 0
    answered: TotalTime = field(default_factory=TotalTime)
    failed: TotalTime = field(default_factory=TotalTime)
    queue: TotalTime = field(default_factory=TotalTime)
    tokenize: TotalTime = field(default_factory=TotalTime)
    run: TotalTime = field(default_factory=TotalTime)
    finish: TotalTime = field(default_factory=TotalTime)
    runs: dict[int, TotalTime] = field(default_factory=lambda: defaultdict(TotalTime))

    def add_answered(
        self, documents: int, *, tokenize: float, queue: float, run: float, finish: float
    ) -> None:
        """Count an answered request by the seconds of its stages."""
        self.last_request = time.time()
        self.documents += documents
        self.answered.add(tokenize + queue + run + finish)
        self.tokenize.add(tokenize)
        self.queue.add(queue)
        self.run.add(run)
        self.finish.add(finish)

    @contextmanager
    def counting_failures(self, began: float) -> Iterator[None]:
        """Count a request as failed if its work raises, or is cancelled at the client's deadline.

        Args:
            began: start of the request by ``time.monotonic``.
        """
        try:
            yield
        except BaseException:
            self.last_request = time.time()
            self.failed.add(time.monotonic() - began)
            raise
