"""Documents on their way through the queue, the runs that they share, and the engine's state."""

import asyncio
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aftexport.engines import Stop
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftserve.model.answers import NO_MARKS, Answer, Decoding
from aftserve.model.costs import MIN_BATCH_GAIN, CostModel
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.model.wanted import EVERY_HEAD, Wanted
from aftserve.types import Tokens

if TYPE_CHECKING:  # offline answers need no metrics, and may lack their package
    from aftserve.observability.metrics import ModelMetrics


_NANOSECONDS = 1_000_000_000
"""Nanoseconds of a second."""


@dataclass(eq=False)
class Progress:
    """The state of a document that runs in chunks, one part in each run."""

    parts: Generator[None, None, Answer]  # pauses after each part
    left: int  # remaining parts, at least one
    started: float = 0.0  # by time.monotonic(); 0 before the first part
    seconds: float = 0.0  # of the parts so far


@dataclass
class BundleBacklog:
    """The queued documents of one bundle, and the calibrated time of their runs."""

    documents: int = 0
    # Integers, so that sums of added and removed documents stay exact for the life of the process.
    whole_nanoseconds: int = 0
    chunked_nanoseconds: int = 0


@dataclass(eq=False)
class Backlog:
    """The queued documents, of all requests or of one."""

    # The model of a bundle may be replaced while its documents wait.
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


@dataclass(eq=False)
class Job:
    """A queued document."""

    active: ActiveBundle
    ids: Tokens
    promised: float  # predicted time of the answer by time.monotonic()
    metrics: "ModelMetrics"  # of the service that accepted it, also after an unload
    future: "asyncio.Future[Result]" = field(  # cancelled once the client has left
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    seconds: float = 0.0  # calibrated, of a single run or of the remaining parts
    single: bool = False  # must not share a run, for example after a shared one failed
    progress: Progress | None = None  # None unless it runs in chunks
    backlog: Backlog = field(default_factory=Backlog)  # of the same request, this document included
    decoding: Decoding = NO_MARKS
    extras: ExtraValues = NO_EXTRAS
    wanted: Wanted = EVERY_HEAD
    client: str = ""  # which has the document's share of the engine

    @property
    def turn_seconds(self) -> float:
        """Predicted time of a single run, or of the next part."""
        seconds = self.seconds * self.active.model.slowdown.value
        return seconds / (self.progress.left if self.progress else 1)

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


MAX_LENGTH_RATIO = 1.5
"""Maximum length of a batch's longest document over that of its shortest."""
_LOOK_AHEAD = 64


@dataclass(eq=False)
class Run:
    """One run of the engine."""

    batch: Sequence[Job]
    model: LoadedModel
    calibrated: float  # seconds of the documents in single runs, or of one document's part
    predicted: float  # seconds
    # The answers, or None if parts are left; of the event loop.
    ended: "asyncio.Future[list[Answer] | None]"
    stop: Stop = field(default_factory=Stop)
    started: float = field(default_factory=time.monotonic)  # by time.monotonic()
    seconds: float = 0.0  # known once it has ended
    unfinished: bool = False  # whether it did one part of a document that has more
    measures: bool = False  # whether it does a step of the measurement of the model's costs

    @property
    def client(self) -> str:
        """The client of the first document; empty without documents."""
        return self.batch[0].client if self.batch else ""

    @property
    def seconds_after(self) -> float:
        """Calibrated seconds of the parts after this one."""
        if not self.batch or self.batch[0].progress is None:
            return 0.0
        return self.batch[0].seconds - self.calibrated

    def work(self) -> list[Answer] | None:
        """Run the engine; see ``ended``."""
        if self.measures:
            self.model.measurement.step(self.stop)
            return []
        if not self.batch:
            self.model.classifier.release()
            return []
        progress = self.batch[0].progress
        if progress is None:
            return self.model.classifier.classify(
                [job.ids for job in self.batch],
                self.stop,
                [job.decoding for job in self.batch],
                [job.extras for job in self.batch],
                [job.wanted for job in self.batch],
            )
        try:
            next(progress.parts)
        except StopIteration as finished:
            return [finished.value]
        finally:
            progress.left = max(1, progress.left - 1)
        return None

    def count_part(self) -> Job:
        """Add the part that this run did to its job's progress, and return the job."""
        (job,) = self.batch
        assert job.progress is not None  # only a document in chunks has parts
        job.progress.started = job.progress.started or self.started
        job.progress.seconds += self.seconds
        job.seconds = max(0.0, job.seconds - self.calibrated)
        return job


@dataclass(frozen=True)
class Idle:
    """The engine waits for jobs."""

    memory_of: LoadedModel | None = None  # its engine keeps the memory of its last run


@dataclass(frozen=True)
class Running:
    """The engine runs documents."""

    run: Run


@dataclass(frozen=True)
class Releasing:
    """The engine gives the memory of its runs back."""

    run: Run


@dataclass(frozen=True)
class Measuring:
    """The engine measures the cost of a run."""

    run: Run
    yields: bool  # whether a document that arrives stops the run


EngineState = Idle | Running | Releasing | Measuring


def next_batch(
    waiting: Iterable[Job],  # the oldest first; at least one
    costs: CostModel,  # of the oldest job's model
    *,
    budget_tokens: int,  # of a batch, padding included
    masks_padding: bool,
    now: float,  # by time.monotonic()
) -> list[Job]:
    """Return the oldest job, with younger ones that cost less in its run than in single runs.

    A younger job may overtake others only while these stay in time. Once a skipped job would be
    answered later than promised, the batch is complete.
    """
    jobs = iter(waiting)
    batch = [next(jobs)]
    longest = shortest = batch[0].tokens
    if batch[0].single or batch[0].progress or longest > costs.batch_tokens:
        return batch
    seconds = batch[0].seconds
    for job, _ in zip(jobs, range(_LOOK_AHEAD), strict=False):
        documents = len(batch) + 1
        if documents > costs.batch_documents:
            break
        high, low = max(longest, job.tokens), min(shortest, job.tokens)
        is_near = high <= MAX_LENGTH_RATIO * low if masks_padding else high == low
        is_single = job.single or job.progress is not None or job.active is not batch[0].active
        if is_near and not is_single and documents * high <= budget_tokens:
            joined = costs.batch(documents, high)
            if joined < (1 - MIN_BATCH_GAIN) * (seconds + job.seconds):
                batch.append(job)
                longest, shortest, seconds = high, low, joined
                continue
        if now + seconds + job.seconds > job.promised:
            break
    return batch


def document_run(
    jobs: Iterable[Job], budget_tokens: int, ended: "asyncio.Future[list[Answer] | None]"
) -> Run:
    """Return the next run with the oldest job, and predict its time; see ``next_batch``."""
    model = next(iter(jobs)).active.model
    batch = next_batch(
        jobs,
        model.measurement.costs,
        budget_tokens=budget_tokens,
        masks_padding=model.classifier.masks_padding,
        now=time.monotonic(),
    )
    if (progress := batch[0].progress) is not None:
        calibrated = seconds = batch[0].seconds / progress.left
    else:
        calibrated = sum(model.measurement.costs.single(job.tokens) for job in batch)
        seconds = model.measurement.costs.batch(len(batch), max(job.tokens for job in batch))
    return Run(batch, model, calibrated, seconds * model.slowdown.value, ended)
