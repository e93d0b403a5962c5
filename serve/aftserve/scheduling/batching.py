"""Which of the waiting documents share the next run."""

import asyncio
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

from aftserve.model.active import Served
from aftserve.model.classifier import Answer, Tokens
from aftserve.model.costs import GAIN, Costs

STRETCH = 1.5
"""Its longest document is at most so many times as long as its shortest."""
_LOOK_AHEAD = 64


@dataclass(eq=False)
class Progress:
    """Of a document that runs in chunks, one part in each run.

    Attributes:
        parts: the work; stops after each.
        left: how many there are still, at least one.
        started: when the first began, by ``time.monotonic``; 0 before that.
        seconds: that the parts so far took.
    """

    parts: Generator[None, None, Answer]
    left: int
    started: float = 0.0
    seconds: float = 0.0


@dataclass(eq=False)
class Backlog:
    """What waits, of all requests or of one.

    Attributes:
        documents: how many.
        seconds: they take one by one, as calibrated, but for those that run in chunks.
        chunked_seconds: those take that run in chunks.
    """

    documents: int = 0
    seconds: float = 0.0
    chunked_seconds: float = 0.0

    def __sub__(self, part: "Backlog") -> "Backlog":
        """What else waits; where that is nothing, rounding leaves no seconds of it."""
        return Backlog(
            self.documents - part.documents,
            round(self.seconds - part.seconds, 9),
            round(self.chunked_seconds - part.chunked_seconds, 9),
        )


@dataclass(eq=False)
class Job:
    """A document that waits for its answer.

    Attributes:
        served: whose tokens they are, and whose model runs them.
        ids: its tokens.
        seconds: of a run of it alone, or of what is left of it, as calibrated.
        promised: when it was predicted to be answered, by ``time.monotonic``.
        future: of the answer; cancelled where nobody wants it any more.
        alone: it must not share a run, because one that it shared has failed.
        progress: of a document that runs in chunks; None of any other.
        request: what waits of the request that it is of, itself included.
    """

    served: Served
    ids: Tokens
    seconds: float
    promised: float
    future: "asyncio.Future[Result]"
    alone: bool = False
    progress: Progress | None = None
    request: Backlog = field(default_factory=Backlog)

    @property
    def tokens(self) -> int:
        """Of the document."""
        return len(self.ids)


@dataclass(frozen=True)
class Result:
    """The answer for one document.

    Attributes:
        answer: label and scores.
        started: when its run began, by ``time.monotonic``.
        inference_seconds: of the run.
        batch_documents: of the run.
    """

    answer: Answer
    started: float
    inference_seconds: float
    batch_documents: int


def next_batch(
    waiting: Iterable[Job], costs: Costs, *, budget_tokens: int, pads: bool, now: float
) -> list[Job]:
    """The oldest job, with younger ones of its model that are cheaper in its run than alone.

    A younger job may overtake others only while those are in time: once one that is passed
    over would be answered later than it was promised, nothing more is taken along.

    Args:
        waiting: jobs, the oldest first; at least one.
        costs: of the oldest one's model on this machine.
        budget_tokens: most tokens of a batch, padding included.
        pads: whether jobs of several lengths may share a run.
        now: by ``time.monotonic``.
    """
    jobs = iter(waiting)
    batch = [next(jobs)]
    longest = shortest = batch[0].tokens
    if batch[0].alone or batch[0].progress or longest > costs.batch_tokens:
        return batch
    together = batch[0].seconds
    for job, _ in zip(jobs, range(_LOOK_AHEAD), strict=False):
        documents = len(batch) + 1
        if documents > costs.batch_documents:
            break
        high, low = max(longest, job.tokens), min(shortest, job.tokens)
        near = high <= STRETCH * low if pads else high == low
        single = job.alone or job.progress is not None or job.served is not batch[0].served
        if near and not single and documents * high <= budget_tokens:
            more = costs.together(documents, high)
            if more < GAIN * (together + job.seconds):
                batch.append(job)
                longest, shortest, together = high, low, more
                continue
        if now + together + job.seconds > job.promised:
            break
    return batch
