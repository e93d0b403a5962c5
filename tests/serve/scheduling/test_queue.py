"""The queue of jobs between the server and the engine's thread."""

import asyncio
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clocks import replace_time
from hypothesis import given
from hypothesis import strategies as st

from aftexport.engines import RunStoppedError, Stop
from aftserve.model import cost_measurement
from aftserve.model.classifier import Classifier
from aftserve.model.cost_measurement import CostMeasurement, MeasuredRange, Shape
from aftserve.scheduling.engine_state import Idle, Measuring, Releasing, Run, Running
from aftserve.scheduling.job import Job, Progress
from aftserve.scheduling.measuring import MeasurementTurns
from aftserve.scheduling.queue import JobQueue

ANY: Any = object()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def job(loop: asyncio.AbstractEventLoop, seconds: float = 0.1) -> Job:
    return Job(ANY, np.zeros(1, np.int64), seconds, 0.0, loop.create_future())


def run_of(jobs: Sequence[Job]) -> Run:
    return Run(jobs, ANY, 0.0, 0.0, ANY)


def first(jobs: Iterable[Job]) -> Run:
    return run_of([next(iter(jobs))])


def release(classifier: Classifier) -> Run:
    return Run((), classifier, 0.0, 0.0, ANY)


def measure(turns: MeasurementTurns) -> Run:
    return Run((), ANY, 0.0, turns.measurement.next_seconds, ANY, measurement=turns.measurement)


def take(queue: JobQueue) -> Sequence[Job]:
    run = queue.take(first, measure)
    return run.batch if run else ()


def test_requeued_jobs_come_first(loop: asyncio.AbstractEventLoop) -> None:
    waiting, jobs = JobQueue(), [job(loop) for _ in range(4)]
    for one in jobs[2:]:
        waiting.put(one)
    waiting.requeue(jobs[:2])
    assert [take(waiting)[0] for _ in jobs] == jobs


@given(st.lists(st.tuples(st.booleans(), st.floats(1e-6, 1e3)), max_size=50))
def test_backlog_is_sum_of_jobs(
    loop: asyncio.AbstractEventLoop, moves: list[tuple[bool, float]]
) -> None:
    waiting, kept = JobQueue(), list[Job]()
    for adds, seconds in moves:
        if adds or not kept:
            kept.append(job(loop, seconds))
            waiting.put(kept[-1])
        else:
            assert waiting.remove(kept.pop(int(seconds) % len(kept)))
        assert len(waiting) == len(kept)
        assert waiting.backlog().seconds == pytest.approx(sum(j.seconds for j in kept), abs=1e-9)
    assert waiting.close() == kept


def test_taken_job_cannot_be_removed(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = JobQueue(), job(loop)
    waiting.put(one)
    assert take(waiting) == [one]
    assert not waiting.remove(one)


def test_take_blocks_while_queue_is_paused(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = JobQueue(), job(loop)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, waiting)
        waiting.pause(True)
        waiting.put(one)
        time.sleep(0.05)
        assert not taken.done()
        waiting.pause(False)
        assert taken.result(30) == [one]


def test_wait_reports_jobs_despite_pause(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = JobQueue(), job(loop)
    assert not waiting.wait(0)
    assert not waiting.wait(0.01)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(waiting.wait, math.inf)
        waiting.pause(True)
        assert not came.done()
        waiting.put(one)
        assert came.result(30)
    assert waiting.wait(0)
    assert waiting.remove(one)
    assert not waiting.wait(0)


def test_close_wakes_waiting_threads(loop: asyncio.AbstractEventLoop) -> None:
    waiting, taken = JobQueue(), list[Sequence[Job]]()
    thread = threading.Thread(target=lambda: taken.append(take(waiting)))
    thread.start()
    waiting.close()
    thread.join(30)
    assert taken == [()]
    assert waiting.wait(math.inf)


def test_every_job_leaves_exactly_once(loop: asyncio.AbstractEventLoop) -> None:
    waiting, taken, removed = JobQueue(), list[Job](), list[Job]()

    def take_all() -> None:
        while run := waiting.take(lambda jobs: run_of(list(jobs)[:3]), measure):
            taken.extend(run.batch)

    thread = threading.Thread(target=take_all)
    thread.start()
    jobs = [job(loop) for _ in range(2000)]
    for older, newer in zip([None, *jobs], jobs, strict=False):
        waiting.put(newer)
        if older is not None and waiting.remove(older):
            removed.append(older)
    left = waiting.close()
    thread.join(30)
    assert len(taken) + len(removed) + len(left) == len(jobs)
    assert set(taken) | set(removed) | set(left) == set(jobs)


def partly_run_job(loop: asyncio.AbstractEventLoop) -> Job:
    one = job(loop, seconds=0.4)
    one.progress = Progress(ANY, left=4)
    return one


def test_unfinished_document_returns_to_front(loop: asyncio.AbstractEventLoop) -> None:
    queue, long, other = JobQueue(), partly_run_job(loop), job(loop)
    queue.put(long)
    run = queue.take(first, measure)
    assert run is not None
    assert queue.state == Running(run)
    assert not queue.remove(long)
    queue.put(other)
    run.calibrated, run.unfinished = 0.1, True
    assert queue.end_run() is None
    assert queue.state == Idle(run.classifier)
    assert long.seconds == pytest.approx(0.3)
    assert queue.backlog().chunked_seconds == pytest.approx(0.3)
    assert queue.close() == [long, other]


def test_cancelled_unfinished_document_is_not_requeued(loop: asyncio.AbstractEventLoop) -> None:
    queue, long = JobQueue(), partly_run_job(loop)
    queue.put(long)
    run = queue.take(first, measure)
    assert run is not None
    run.unfinished = True
    long.future.cancel()
    assert queue.end_run() is long
    assert not queue.remove(long)
    assert len(queue) == 0


def test_memory_is_released_once_when_idle(loop: asyncio.AbstractEventLoop) -> None:
    queue = JobQueue()
    assert queue.begin_release(release) is None
    queue.put(job(loop))
    run = queue.take(first, measure)
    assert run is not None
    assert queue.begin_release(release) is None  # a run is in progress
    queue.end_run()
    released = queue.begin_release(release)
    assert released is not None
    assert queue.state == Releasing(released)
    queue.end_run()
    assert queue.state == Idle()
    assert queue.begin_release(release) is None


@pytest.mark.parametrize("running", [False, True])
def test_replaced_models_memory_is_not_released(
    running: bool, loop: asyncio.AbstractEventLoop
) -> None:
    queue = JobQueue()
    queue.put(job(loop))
    queue.take(first, measure)
    if running:
        queue.forget_memory()
        queue.end_run()
    else:
        queue.end_run()
        queue.forget_memory()
    assert queue.state == Idle()
    assert queue.begin_release(release) is None


class Turns(MeasurementTurns):
    """Turns of a real measurement, on a clock of the test.

    Args:
        seconds: time of the runs after the first ones.

    Attributes:
        now: time of the clock.
        arrival: called 70 ms after the start of a run.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.now, self.arrival, self._seconds = 0.0, lambda: None, 0.0
        measurement = CostMeasurement(self._run, MeasuredRange(1, 16, 16))
        measurement.measure_first()
        self._seconds = seconds
        model: Any = SimpleNamespace(measurement=measurement, classifier=ANY)
        super().__init__(model, clock=lambda: self.now)

    def _run(self, shape: Shape, stop: Stop | None) -> None:
        if not self._seconds:
            return
        self.now += 0.07
        self.arrival()
        if stop is not None and stop.is_requested:
            raise RunStoppedError
        self.now += self._seconds - 0.07

    def spend(self, seconds: float) -> None:
        self.measurement.seconds += seconds


def test_empty_queue_gives_measurement_its_turn() -> None:
    queue, turns = JobQueue(), Turns()
    turns.spend(1.0)
    assert not turns.is_due
    queue.measure(turns)
    assert queue.wait(0)
    run = queue.take(first, measure)
    assert run is not None
    assert run.measurement is turns.measurement
    assert queue.state == Measuring(run, yields=True)
    queue.end_run()
    assert queue.state == Idle(run.classifier)


def test_arriving_job_stops_measurement(loop: asyncio.AbstractEventLoop) -> None:
    queue, turns = JobQueue(), Turns()
    turns.spend(1.0)
    queue.measure(turns)
    run = queue.take(first, measure)
    assert run is not None
    assert not run.stop.is_requested
    queue.put(job(loop))
    assert run.stop.is_requested


def test_waiting_jobs_leave_measurements_a_tenth(loop: asyncio.AbstractEventLoop) -> None:
    """Each measurement takes a second, and each job; the queue never becomes empty."""
    queue, turns = JobQueue(), Turns()
    turns.spend(0.01)
    queue.measure(turns)
    measured = 0
    for _ in range(1000):
        queue.put(job(loop))
        run = queue.take(first, measure)
        assert run is not None
        turns.now += 1.0
        if run.measurement is not None:
            assert queue.state == Measuring(run, yields=False)
            turns.spend(1.0)
            measured += 1
        queue.end_run()
    assert 95 <= measured <= 101


def test_job_does_not_stop_due_measurement(loop: asyncio.AbstractEventLoop) -> None:
    queue, turns = JobQueue(), Turns()
    turns.now = 100.0
    queue.measure(turns)
    run = queue.take(first, measure)
    assert run is not None
    queue.put(job(loop))
    assert not run.stop.is_requested


def test_short_gaps_complete_measurements(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement takes 0.4 s. A document of 1 ms arrives 70 ms after the one before."""
    queue, turns, stops = JobQueue(), Turns(seconds=0.4), 0
    replace_time(monkeypatch, cost_measurement, perf_counter=lambda: turns.now)
    queue.measure(turns)
    while not turns.measurement.is_done:
        assert turns.now < 1000
        run = queue.take(first, measure)
        assert run is not None
        if run.measurement is None:
            turns.now += 0.001
        else:
            turns.arrival = lambda: queue.put(job(loop))
            try:
                run.measurement.step(run.stop)
            except RunStoppedError:
                stops += 1
        queue.end_run()
    assert stops > 10
    assert turns.now <= 10 * turns.measurement.seconds + 0.4


def test_paused_queue_begins_no_measurement() -> None:
    queue, turns = JobQueue(), Turns()
    queue.pause(True)
    queue.measure(turns)
    assert not queue.wait(0)
    queue.pause(False)
    assert queue.wait(0)


def test_other_model_stops_measurement() -> None:
    queue, turns = JobQueue(), Turns()
    turns.now = 100.0
    queue.measure(turns)
    run = queue.take(first, measure)
    assert run is not None
    queue.forget_memory()
    queue.measure(Turns())
    assert run.stop.is_requested
    queue.end_run()
    assert queue.state == Idle()


def test_complete_measurement_has_no_turns() -> None:
    queue, turns = JobQueue(), Turns()
    turns.measurement.measure_all()
    queue.measure(turns)
    assert not turns.is_due
    assert not queue.wait(0)


def test_delay_is_at_most_a_tenth() -> None:
    turns = Turns()
    assert turns.delay(20.0) == pytest.approx(2.0)
    turns.spend(1.5)
    assert turns.delay(20.0) == pytest.approx(0.5)
    turns.spend(1.0)
    assert turns.delay(20.0) == 0.0
    turns.measurement.measure_all()
    assert turns.delay(1000.0) == 0.0
