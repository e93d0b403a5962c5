"""Documents that by first estimates take longer than their deadline."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from clocks import replace_time

from aftexport.engines import RunStoppedError, Stop
from aftexport.errors import EngineError
from aftserve.errors import BusyError, DocumentTooLongError, UnavailableError
from aftserve.http.clients import Client
from aftserve.model import costs
from aftserve.model.costs import CostMeasurement, MeasuredRange, Shape, SlowdownFactor
from aftserve.scheduling.admission import Admission
from aftserve.scheduling.batching import Backlog
from aftserve.scheduling.engine_thread import StalledError
from aftserve.scheduling.scheduler import Scheduler

TOKENS = 1_000_000
"""Length of a document that takes hours by first estimates."""
DEADLINE_SECONDS = 100.0


class Model:
    """A model with first estimates from one run; a function does its further runs."""

    def __init__(self, run: Callable[[Stop], None] = lambda stop: None) -> None:
        self.measurement = CostMeasurement(self._measure, MeasuredRange(1, 16, 16, batching=False))
        self.classifier = SimpleNamespace(
            in_chunks=lambda tokens: False, engine=SimpleNamespace(release=lambda: None)
        )
        self.name = "model"
        self.slowdown = SlowdownFactor()
        self._run = run
        # The first run takes a millisecond: on a busy machine, estimates would be hours, also those
        # by which a run counts as stalled.
        clock = itertools.count(0, 0.001)
        with pytest.MonkeyPatch.context() as patch:
            replace_time(patch, costs, perf_counter=lambda: next(clock))
            self.measurement.step()

    @property
    def costs(self) -> Any:
        return self.measurement.costs

    def _measure(self, shape: Shape, stop: Stop | None) -> None:
        if stop is None:
            time.sleep(0.001)
        else:
            self._run(stop)


def make_scheduler(model: Any, stall_seconds: float = 300.0) -> Scheduler:
    scheduler = Scheduler(budget_tokens=16, stall_seconds=stall_seconds, idle_seconds=math.inf)
    scheduler.measure(model)
    return scheduler


async def admit(scheduler: Scheduler, model: Any, seconds: float = DEADLINE_SECONDS) -> float:
    deadline = time.monotonic() + seconds
    return await Admission(scheduler, 10.0).admit(model, [TOKENS], deadline, Backlog(), Client(""))


async def served(scheduler: Scheduler, model: Any) -> float:
    """Admit a document while the scheduler serves."""
    serving = asyncio.create_task(scheduler.serve())
    try:
        return await asyncio.wait_for(admit(scheduler, model), 60)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError, StalledError):
            await serving
        if (run := scheduler._queue.current_run) is not None:
            run.stop.request()  # the engine's thread begins another run before it hears of the end


def is_trusted(model: Model) -> bool:
    model.slowdown.observe(100.0, 1.0)
    return model.slowdown.value < 1


def failing(stop: Stop) -> None:
    raise EngineError("out of memory", "Use less.")


def stalling(stop: Stop) -> None:
    while not stop.is_requested:
        time.sleep(0.01)
    raise RunStoppedError


def test_measurement_before_deadline_admits_document() -> None:
    model = Model()
    scheduler = make_scheduler(model)
    assert model.costs.single(TOKENS) > DEADLINE_SECONDS
    assert asyncio.run(served(scheduler, model)) < DEADLINE_SECONDS
    assert is_trusted(model)


def test_deadline_before_measurement_gets_429() -> None:
    model = Model()
    with pytest.raises(BusyError, match="is not measured yet"):
        asyncio.run(admit(make_scheduler(model), model, seconds=2.0))


def test_complete_measurement_gets_413() -> None:
    model = Model(lambda stop: time.sleep(0.01))
    model.measurement.measure_all()
    with pytest.raises(DocumentTooLongError):
        asyncio.run(admit(make_scheduler(model), model, seconds=1.0))


@pytest.mark.parametrize(("run", "stall_seconds"), [(failing, 300.0), (stalling, 4.0)])
def test_failed_measurement_gets_no_413(
    run: Callable[[Stop], None], stall_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(run)
    scheduler = make_scheduler(model, stall_seconds)
    with caplog.at_level(logging.INFO, "aftserve.scheduler"):
        assert asyncio.run(served(scheduler, model)) > DEADLINE_SECONDS
    assert not is_trusted(model)
    assert "first estimates stay" in caplog.text
    assert "measured the costs" not in caplog.text


def test_replaced_model_admits_waiting_document() -> None:
    async def scenario() -> float:
        model = Model()
        scheduler = make_scheduler(model)
        waiting = asyncio.create_task(admit(scheduler, model))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        scheduler.forget(model)  # type: ignore[arg-type]
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(scenario()) > DEADLINE_SECONDS


def test_stalled_scheduler_gets_503() -> None:
    """The measurement neither ends nor can be stopped."""
    is_over = False

    def endless(stop: Stop) -> None:
        while not is_over:
            time.sleep(0.01)

    model = Model(endless)
    try:
        with pytest.raises(UnavailableError, match="stopped working"):
            asyncio.run(served(make_scheduler(model, stall_seconds=0.05), model))
    finally:
        is_over = True
