"""Jobs of models without engines, and a queue whose measurements run on a clock of the test."""

import asyncio
import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from aftexport.engines import RunStoppedError, Stop
from aftserve.model.costs import CostMeasurement, MeasuredRange, Shape
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.scheduling.batching import Run
from aftserve.scheduling.job import Job
from aftserve.scheduling.measuring import MeasurementTurns
from aftserve.scheduling.queue import JobQueue

ANY: Any = object()
CLASSIFIER: Any = SimpleNamespace(min_tokens=1)


def make_bundle(name: str = "a", measurement: CostMeasurement | None = None) -> ActiveBundle:
    """Return a bundle whose model has no engine."""
    if measurement is None:
        measurement = CostMeasurement(lambda shape, stop: None, MeasuredRange(1, 16, 16))
        measurement.measure_first()
    return ActiveBundle(ANY, LoadedModel(name, CLASSIFIER, (), measurement, "", False, ()))


BUNDLE = make_bundle()
"""The bundle of jobs without another one."""


def job(
    loop: asyncio.AbstractEventLoop, seconds: float = 0.1, active: ActiveBundle = BUNDLE
) -> Job:
    """Return a document of one token."""
    return Job(active, np.zeros(1, np.int64), seconds, math.inf, loop.create_future(), ANY)


def run_of(jobs: Sequence[Job]) -> Run:
    """Return a run of these jobs."""
    return Run(jobs, jobs[0].active.model, 0.0, 0.0, ANY)


def first(jobs: Iterable[Job]) -> Run:
    """Return a run of the first job."""
    return run_of([next(iter(jobs))])


def release(model: LoadedModel) -> Run:
    """Return a run that releases memory."""
    return Run((), model, 0.0, 0.0, ANY)


class MeasuringQueue(JobQueue):
    """A queue beside measurements, which run on a clock of the test.

    ``arrival`` is called 70 ms after the start of each run that measures.
    """

    def __init__(self) -> None:
        self.now, self.arrival = 0.0, lambda: None
        self.turns = MeasurementTurns(clock=lambda: self.now)
        super().__init__(self.turns)

    def make_bundle(self, name: str = "a", *, seconds: float = 0.0) -> ActiveBundle:
        """Return a bundle with first estimates, whose further runs take this time."""
        begun = False

        def run(shape: Shape, stop: Stop | None) -> None:
            if not (begun and seconds):
                return
            self.now += 0.07
            self.arrival()
            if stop is not None and stop.is_requested:
                raise RunStoppedError
            self.now += seconds - 0.07

        measurement = CostMeasurement(run, MeasuredRange(1, 16, 16))
        measurement.measure_first()
        begun = True
        return make_bundle(name, measurement)

    def measured_bundle(self, name: str = "a", *, seconds: float = 0.0) -> ActiveBundle:
        """Return a bundle of which the queue measures the costs; see ``make_bundle``."""
        active = self.make_bundle(name, seconds=seconds)
        self.measure(active.model)
        return active

    def next_run(self) -> Run | None:
        """Begin the next run."""
        return self.take(first, lambda model: self.turns.make_run(model, lambda: ANY), release)

    def finish(self, run: Run, seconds: float) -> None:
        """End a run that took this time."""
        self.now += seconds
        run.seconds = seconds
        if run.measures:
            run.model.measurement.seconds += seconds
        self.end_run()
