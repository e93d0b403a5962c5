"""The turns of measurements between documents, of one model and of several."""

import asyncio
from collections.abc import Iterator

import pytest
from clocks import replace_time
from hypothesis import given, settings
from hypothesis import strategies as st
from queued_jobs import ANY, MeasuringQueue, job

from aftexport.engines import RunStoppedError
from aftserve.model import costs
from aftserve.model.costs import CostMeasurement
from aftserve.model.load import LoadedModel
from aftserve.scheduling.batching import Idle, Measuring, Run


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def queue() -> MeasuringQueue:
    return MeasuringQueue()


def begin(queue: MeasuringQueue) -> Run:
    run = queue.next_run()
    assert run is not None
    return run


def spend(queue: MeasuringQueue, model: LoadedModel, seconds: float) -> None:
    """Use up a part of the time for measurements."""
    queue.turns.make_run(model, lambda: ANY)
    model.measurement.seconds += seconds
    queue.turns.end_run(model)


def test_empty_queue_gives_measurement_its_turn(queue: MeasuringQueue) -> None:
    model = queue.measured_bundle().model
    spend(queue, model, 1.0)
    assert not queue.turns.is_due(model)
    assert queue.wait(0)
    run = begin(queue)
    assert run.measures
    assert run.model is model
    assert queue.state == Measuring(run, yields=True)
    queue.end_run()
    assert queue.state == Idle(model)


def test_arriving_job_stops_measurement(
    queue: MeasuringQueue, loop: asyncio.AbstractEventLoop
) -> None:
    active = queue.measured_bundle()
    spend(queue, active.model, 1.0)
    run = begin(queue)
    assert not run.stop.is_requested
    queue.put(job(loop))
    assert run.stop.is_requested


@pytest.mark.parametrize("models", [1, 3])
def test_waiting_jobs_leave_measurements_a_tenth(
    models: int, queue: MeasuringQueue, loop: asyncio.AbstractEventLoop
) -> None:
    """Each measurement takes a second, and each job; the queue never becomes empty."""
    bundles = [queue.measured_bundle(name) for name in "abc"[:models]]
    measured = 0
    for _ in range(1000):
        queue.put(job(loop, active=bundles[0]))
        run = begin(queue)
        if not run.batch and not run.measures:
            queue.finish(run, 0.0)
            run = begin(queue)
        if run.measures:
            assert queue.state == Measuring(run, yields=False)
            measured += 1
        queue.finish(run, 1.0)
    assert 95 <= measured <= 101


def test_job_does_not_stop_due_measurement(
    queue: MeasuringQueue, loop: asyncio.AbstractEventLoop
) -> None:
    active = queue.measured_bundle()
    queue.now = 100.0
    run = begin(queue)
    queue.put(job(loop, active=active))
    assert not run.stop.is_requested


@pytest.mark.parametrize("models", [1, 3])
def test_short_gaps_complete_measurements(
    models: int,
    queue: MeasuringQueue,
    loop: asyncio.AbstractEventLoop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each measurement takes 0.4 s. A document of 1 ms arrives 70 ms after the one before."""
    bundles = [queue.measured_bundle(name, seconds=0.4) for name in "abc"[:models]]
    replace_time(monkeypatch, costs, perf_counter=lambda: queue.now)
    stops = 0
    while not all(active.model.measurement.is_done for active in bundles):
        assert queue.now < 3000
        run = begin(queue)
        if run.measures:
            queue.arrival = lambda: queue.put(job(loop, active=bundles[0]))
            try:
                run.model.measurement.step(run.stop)
            except RunStoppedError:
                stops += 1
        else:
            queue.now += 0.001
        queue.end_run()
    assert stops > 10
    taken = sum(active.model.measurement.seconds for active in bundles)
    assert queue.now <= 10 * taken + 0.4


def test_paused_bundle_begins_no_measurement(queue: MeasuringQueue) -> None:
    held, other = queue.measured_bundle("a"), queue.measured_bundle("b")
    queue.pause(held)
    assert begin(queue).model is other.model
    queue.end_run()
    queue.pause(other)
    assert not queue.wait(0)
    queue.resume(held)
    assert queue.wait(0)


def test_forgotten_model_stops_measurement(queue: MeasuringQueue) -> None:
    old, other = queue.measured_bundle("a"), queue.measured_bundle("b")
    queue.now = 100.0
    run = begin(queue)
    assert run.model is old.model
    queue.forget(old.model)
    assert run.stop.is_requested
    queue.end_run()
    assert queue.state == Idle()
    assert begin(queue).model is other.model


def test_forgotten_model_leaves_others_measuring(queue: MeasuringQueue) -> None:
    other, old = queue.measured_bundle("b"), queue.measured_bundle("a")
    run = begin(queue)
    queue.forget(old.model)
    assert not run.stop.is_requested
    queue.end_run()
    assert queue.state == Idle(other.model)


def test_complete_measurement_has_no_turns(queue: MeasuringQueue) -> None:
    active = queue.make_bundle()
    active.model.measurement.measure_all()
    queue.measure(active.model)
    assert active.model in queue.turns
    assert queue.turns.next() is None
    assert not queue.wait(0)


def test_later_model_saves_no_time_up(queue: MeasuringQueue) -> None:
    """The time in which nothing was measured gives a later model no larger share."""
    queue.measured_bundle("a").model.measurement.measure_all()
    queue.now = 1e6
    later = queue.measured_bundle("b").model
    spend(queue, later, 1.0)
    queue.now += 9.0
    assert not queue.turns.is_due(later)
    queue.now += 2.0
    assert queue.turns.is_due(later)


@settings(deadline=None)
@given(seconds=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=4), steps=st.integers(4, 30))
def test_turns_are_fair_between_models(
    loop: asyncio.AbstractEventLoop, seconds: list[float], steps: int
) -> None:
    """Models with measurements of different length get equally many while documents wait."""
    queue = MeasuringQueue()
    bundles = [queue.measured_bundle(str(number)) for number in range(len(seconds))]
    counts = [0] * len(bundles)
    while sum(counts) < steps:
        queue.put(job(loop, active=bundles[0]))
        run = begin(queue)
        number = next(n for n, active in enumerate(bundles) if active.model is run.model)
        counts[number] += run.measures
        queue.finish(run, seconds[number] if run.measures else 0.2)
    assert max(counts) - min(counts) <= 1


def test_long_measurement_delays_no_other(
    queue: MeasuringQueue, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step of the first model is due after 300 s, and that of the second after 1 s."""
    long, quick = queue.measured_bundle("a"), queue.measured_bundle("b")
    seconds = {long.model.measurement: 30.0, quick.model.measurement: 0.1}
    monkeypatch.setattr(CostMeasurement, "next_seconds", property(seconds.get))
    queue.now = 2.0
    queue.put(job(loop, active=quick))
    run = begin(queue)
    assert (run.measures, run.model) == (True, quick.model)
    queue.finish(run, 0.1)
    queue.now = 400.0
    run = begin(queue)
    assert (run.measures, run.model) == (False, quick.model)  # the release before the long one
    queue.finish(run, 0.0)
    assert begin(queue).model is long.model


def test_stopped_measurement_ends_turn(queue: MeasuringQueue) -> None:
    for name in "ab":
        queue.measured_bundle(name)
    run = begin(queue)
    queue.end_run()  # without a step
    assert queue.turns.next() is not run.model
