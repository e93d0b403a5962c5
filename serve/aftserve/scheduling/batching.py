"""Runs of the engine: the documents that share one, and the engine's state between runs."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from aftexport.engines import Stop
from aftserve.model.answers import Answer
from aftserve.model.costs import MIN_BATCH_GAIN, CostModel
from aftserve.model.load import LoadedModel
from aftserve.scheduling.job import Job

MAX_LENGTH_RATIO = 1.5
"""Maximum length of a batch's longest document over that of its shortest."""
_LOOK_AHEAD = 64


@dataclass(eq=False)
class Run:
    """One run of the engine.

    Attributes:
        batch: jobs that the run answers. A run without jobs measures the model's costs, or
            releases its engine's memory.
        model: the model that runs them.
        calibrated: calibrated seconds of the documents in single runs, or of one document's part.
        predicted: predicted seconds of the run.
        ended: the answers, None if parts are left, or the error; a future of the event loop.
        stop: ends the run early.
        started: start by ``time.monotonic``.
        seconds: time of the run, known once it has ended.
        unfinished: whether the run did one part of a document that has more.
        measures: whether the run does a step of the measurement of the model's costs.
    """

    batch: Sequence[Job]
    model: LoadedModel
    calibrated: float
    predicted: float
    ended: "asyncio.Future[list[Answer] | None]"
    stop: Stop = field(default_factory=Stop)
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    unfinished: bool = False
    measures: bool = False

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
            self.model.classifier.engine.release()
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
    """The engine waits for jobs.

    Attributes:
        memory_of: the model whose engine keeps the memory of its last run; None once released.
    """

    memory_of: LoadedModel | None = None


@dataclass(frozen=True)
class Running:
    """The engine runs documents."""

    run: Run


@dataclass(frozen=True)
class Releasing:
    """The engine gives the memory of its runs back.

    Attributes:
        run: a run without documents.
        for_measurement: whether a measurement that is due needs the release.
    """

    run: Run
    for_measurement: bool = False


@dataclass(frozen=True)
class Measuring:
    """The engine measures the cost of a run."""

    run: Run
    yields: bool  # whether a document that arrives stops the run


EngineState = Idle | Running | Releasing | Measuring


def next_batch(
    waiting: Iterable[Job],
    costs: CostModel,
    *,
    budget_tokens: int,
    masks_padding: bool,
    now: float,
) -> list[Job]:
    """Return the oldest job, with younger ones that cost less in its run than in single runs.

    A younger job may overtake others only while these stay in time. Once a skipped job would be
    answered later than promised, the batch is complete.

    Args:
        waiting: jobs, the oldest first; at least one.
        costs: cost model of the oldest job's model on this machine.
        budget_tokens: maximum tokens of a batch, padding included.
        masks_padding: whether jobs of several lengths may share a run.
        now: current time by ``time.monotonic``.
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
        model.costs,
        budget_tokens=budget_tokens,
        masks_padding=model.classifier.masks_padding,
        now=time.monotonic(),
    )
    if (progress := batch[0].progress) is not None:
        calibrated = seconds = batch[0].seconds / progress.left
    else:
        calibrated = sum(model.costs.single(job.tokens) for job in batch)
        seconds = model.costs.batch(len(batch), max(job.tokens for job in batch))
    return Run(batch, model, calibrated, seconds * model.slowdown.value, ended)
