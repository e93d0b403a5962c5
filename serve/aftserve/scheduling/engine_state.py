"""The current run of the engine, and the engine's state between runs."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aftexport.engines import Stop
from aftserve.model.answers import Answer
from aftserve.model.load import LoadedModel
from aftserve.scheduling.job import Job


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
    """The engine runs documents.

    Attributes:
        run: the current run.
    """

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
    """The engine measures the cost of a run.

    Attributes:
        run: a run without documents.
        yields: whether a document that arrives stops the run.
    """

    run: Run
    yields: bool


EngineState = Idle | Running | Releasing | Measuring
