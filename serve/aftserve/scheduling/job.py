"""A document on its way through the queue, and its result."""

import asyncio
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftserve.model.answers import NO_MARKS, Answer, Decoding
from aftserve.model.load import ActiveBundle
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.types import Tokens

if TYPE_CHECKING:  # offline answers need no metrics, and its package may be missing there
    from aftserve.observability.model_metrics import ModelMetrics

_NANOSECONDS = 1_000_000_000
"""Nanoseconds of a second."""


@dataclass(eq=False)
class Progress:
    """The state of a document that runs in chunks, one part in each run.

    Attributes:
        parts: the work; it pauses after each part.
        left: number of remaining parts, at least one.
        started: start of the first part by ``time.monotonic``; 0 before it.
        seconds: time of the parts so far.
    """

    parts: Generator[None, None, Answer]
    left: int
    started: float = 0.0
    seconds: float = 0.0


@dataclass
class BundleBacklog:
    """The queued documents of one bundle.

    The times are integers, so that sums of added and removed documents stay exact for the life of
    the process.

    Attributes:
        documents: number of documents.
        whole_nanoseconds: calibrated time of single runs of the documents that run whole.
        chunked_nanoseconds: calibrated time of the documents that run in chunks.
    """

    documents: int = 0
    whole_nanoseconds: int = 0
    chunked_nanoseconds: int = 0

    def __sub__(self, part: "BundleBacklog") -> "BundleBacklog":
        """Return the rest without a part of these documents."""
        return BundleBacklog(
            self.documents - part.documents,
            self.whole_nanoseconds - part.whole_nanoseconds,
            self.chunked_nanoseconds - part.chunked_nanoseconds,
        )

    @property
    def seconds(self) -> float:
        """Calibrated time of single runs of the documents that run whole."""
        return self.whole_nanoseconds / _NANOSECONDS

    @property
    def chunked_seconds(self) -> float:
        """Calibrated time of the documents that run in chunks."""
        return self.chunked_nanoseconds / _NANOSECONDS


@dataclass(eq=False)
class Backlog:
    """The queued documents, of all requests or of one.

    Attributes:
        bundles: the documents of each bundle that has any. The model of a bundle may be replaced
            while its documents wait.
    """

    bundles: dict[ActiveBundle, BundleBacklog] = field(default_factory=dict)

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(part.documents for part in self.bundles.values())

    def count(self, job: "Job", sign: int) -> None:
        """Add a job by the sign 1, or remove it by the sign -1."""
        part = self.bundles.setdefault(job.active, BundleBacklog())
        part.documents += sign
        nanoseconds = sign * round(_NANOSECONDS * job.seconds)
        if job.progress is None:
            part.whole_nanoseconds += nanoseconds
        else:
            part.chunked_nanoseconds += nanoseconds
        if not part.documents:
            del self.bundles[job.active]  # otherwise it would keep a replaced model in memory

    def seconds_without(self, part: "Backlog", *, in_chunks: bool) -> float:
        """Return the predicted time of the rest, by the slowdown of each model."""
        seconds = 0.0
        for active, one in self.bundles.items():
            nanoseconds = one.whole_nanoseconds + in_chunks * one.chunked_nanoseconds
            if (other := part.bundles.get(active)) is not None:
                nanoseconds -= other.whole_nanoseconds + in_chunks * other.chunked_nanoseconds
            seconds += nanoseconds / _NANOSECONDS * active.model.slowdown.value
        return seconds

    def __sub__(self, part: "Backlog") -> "Backlog":
        """Return the rest without some of these documents."""
        none = BundleBacklog()
        return Backlog(
            {active: one - part.bundles.get(active, none) for active, one in self.bundles.items()}
        )


@dataclass(eq=False)
class Job:
    """A queued document.

    Attributes:
        active: the bundle whose tokenizer made the tokens and whose model runs them.
        ids: tokens of the document.
        seconds: calibrated time of a single run, or of the remaining parts.
        promised: predicted time of the answer by ``time.monotonic``.
        future: the result; cancelled once the client has left.
        metrics: metrics of the service that accepted it. A run that ends after an unload counts
            there, and not for a later service of the same name.
        single: whether the job must not share a run, for example after a shared run failed.
        progress: state of a document that runs in chunks; None for others.
        backlog: queued documents of the same request, this one included.
        decoding: decoding of the rows of its tokens.
        extras: extra inputs of the document.
        wanted: wanted part of the answer.
        client: client that has the document's share of the engine.
    """

    active: ActiveBundle
    ids: Tokens
    seconds: float
    promised: float
    future: "asyncio.Future[Result]"
    metrics: "ModelMetrics"
    single: bool = False
    progress: Progress | None = None
    backlog: Backlog = field(default_factory=Backlog)
    decoding: Decoding = NO_MARKS
    extras: ExtraValues = NO_EXTRAS
    wanted: Wanted = EVERY_HEAD
    client: str = ""

    @property
    def turn_seconds(self) -> float:
        """Predicted time of a single run, or of the next part."""
        return self.predicted_seconds / (self.progress.left if self.progress else 1)

    @property
    def predicted_seconds(self) -> float:
        """Predicted time of a single run, or of the remaining parts."""
        return self.seconds * self.active.model.slowdown.value

    def misses_promise(self, seconds: float) -> bool:
        """Return whether the answer comes too late if the document has its turn in ``seconds``."""
        return time.monotonic() + seconds + self.predicted_seconds > self.promised

    @property
    def tokens(self) -> int:
        """Length of the document."""
        return len(self.ids)


def make_progress(job: Job) -> Progress | None:
    """Return the state of a document in chunks before its first part; None for other documents."""
    classifier = job.active.model.classifier
    if not classifier.in_chunks(job.tokens):
        return None
    return Progress(
        classifier.parts(job.ids, job.extras, decoding=job.decoding, wanted=job.wanted),
        classifier.part_count(job.tokens, job.wanted),
    )


@dataclass(frozen=True)
class Result:
    """The answer for one document."""

    answer: Answer
    started: float  # by time.monotonic()
    inference_seconds: float
    batch_documents: int
