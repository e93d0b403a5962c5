"""Jobs of models without engines, and a queue whose measurements run on a clock of the test."""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from aftexport.engines import RunStoppedError, Stop
from aftserve.model.costs import CostMeasurement, MeasuredRange, Shape
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.scheduling.batching import Job, Run
from aftserve.scheduling.queue import JobQueue

ANY: Any = object()
CLASSIFIER: Any = SimpleNamespace(
    in_chunks=lambda tokens: False, engine=SimpleNamespace(release=lambda: None)
)


def make_bundle(name: str = "a", measurement: CostMeasurement | None = None) -> ActiveBundle:
    """Return a bundle whose model has no engine."""
    if measurement is None:
        measurement = CostMeasurement(lambda shape, stop: None, MeasuredRange(1, 16, 16))
        measurement.measure_first()
    return ActiveBundle(ANY, LoadedModel(name, CLASSIFIER, (), measurement, "", False, ()))


BUNDLE = make_bundle()
"""The bundle of jobs without another one."""


def job(seconds: float = 0.1, active: ActiveBundle = BUNDLE, tokens: int = 1) -> Job:
    """Return a document whose future belongs to no event loop."""
    future: Any = Future()
    return Job(active, np.zeros(tokens, np.int64), math.inf, ANY, future, seconds)


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
    """A queue beside measurements, which run on a clock of the test."""

    def __init__(self) -> None:
        self.now, self.arrival = 0.0, lambda: None  # 70 ms after the start of a measurement
        super().__init__()
        self.turns._now = lambda: self.now  # type: ignore[method-assign]
        self.turns._since = 0.0

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

    def next_run(self) -> Run:
        """Begin the next run."""
        run = self.take(first, lambda model: self.turns.make_run(model, lambda: ANY), release)
        assert run is not None
        return run

    def finish(self, run: Run, seconds: float) -> None:
        """End a run that took this time."""
        self.now += seconds
        run.seconds = seconds
        if run.measures:
            run.model.measurement.seconds += seconds
        self.end_run()
