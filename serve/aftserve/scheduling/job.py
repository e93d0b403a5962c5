"""A document on its way through the queue, and its result."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass, field

from aftserve.model.active import Served
from aftserve.model.classifier import Answer
from aftserve.types import Tokens


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
