"""The queue of jobs, the turns of clients and of measurements, and the engine's state."""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from clocks import replace_time
from hypothesis import given, settings
from hypothesis import strategies as st
from queued_jobs import ANY, BUNDLE, MeasuringQueue, first, job, make_bundle, release, run_of

from aftexport.engines import RunStoppedError
from aftserve.model import costs
from aftserve.model.costs import CostMeasurement
from aftserve.model.load import ActiveBundle, LoadedModel
from aftserve.scheduling.batching import (
    Backlog,
    BundleBacklog,
    Idle,
    Job,
    Measuring,
    Progress,
    Releasing,
    Run,
    Running,
)
from aftserve.scheduling.queue import ClientTurns, JobQueue


def next_run(queue: JobQueue) -> Run:
    run = queue.take(first, ANY, release)
    assert run is not None
    return run


def take(queue: JobQueue) -> Sequence[Job]:
    run = queue.take(first, ANY, release)
    return run.batch if run else ()


def test_requeued_jobs_come_first() -> None:
    waiting, jobs = JobQueue(), [job() for _ in range(4)]
    for one in jobs[2:]:
        waiting.put(one)
    waiting.requeue(jobs[:2])
    assert [take(waiting)[0] for _ in jobs] == jobs


def parts(jobs: Iterable[Job]) -> dict[ActiveBundle, BundleBacklog]:
    """Return the backlog of jobs that run whole, each bundle's by itself."""
    found = dict[ActiveBundle, BundleBacklog]()
    for one in jobs:
        part = found.setdefault(one.active, BundleBacklog())
        part.documents += 1
        part.whole_nanoseconds += round(1e9 * one.seconds)
    return found


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 2), st.booleans(), st.floats(1e-6, 1e3)),
        max_size=50,
    )
)
def test_backlog_is_exact_sum_of_jobs(moves: list[tuple[bool, int, bool, float]]) -> None:
    """Each move adds a document of one of three bundles and two requests, or removes one."""
    waiting, kept, own = JobQueue(), list[Job](), Backlog()
    bundles = [make_bundle(name) for name in "abc"]
    for adds, number, is_own, seconds in moves:
        if adds or not kept:
            kept.append(job(seconds, bundles[number]))
            if is_own:
                kept[-1].backlog = own
            waiting.put(kept[-1])
        else:
            assert waiting.remove(kept.pop(int(seconds) % len(kept)))
        assert len(waiting) == waiting._backlog.documents == len(kept)
        assert waiting._backlog.bundles == parts(kept)
        assert own.bundles == parts(one for one in kept if one.backlog is own)
    assert waiting.close() == kept


def test_take_blocks_while_queue_is_paused() -> None:
    waiting, one = JobQueue(), job()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, waiting)
        waiting.pause(BUNDLE)
        waiting.put(one)
        time.sleep(0.05)
        assert not taken.done()
        waiting.resume(BUNDLE)
        assert taken.result(30) == [one]


def test_wait_reports_jobs_despite_pause() -> None:
    waiting, one = JobQueue(), job()
    assert not waiting.wait(0)
    assert not waiting.wait(0.01)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(waiting.wait, math.inf)
        waiting.pause(BUNDLE)
        assert not came.done()
        waiting.put(one)
        assert came.result(30)
    assert waiting.wait(0)
    assert waiting.remove(one)
    assert not waiting.wait(0)


def test_close_wakes_waiting_threads() -> None:
    waiting, taken = JobQueue(), list[Sequence[Job]]()
    thread = threading.Thread(target=lambda: taken.append(take(waiting)))
    thread.start()
    waiting.close()
    thread.join(30)
    assert taken == [()]
    assert waiting.wait(math.inf)


def test_every_job_leaves_exactly_once() -> None:
    waiting, taken, removed = JobQueue(), list[Job](), list[Job]()

    def take_all() -> None:
        while run := waiting.take(lambda jobs: run_of(list(jobs)[:3]), ANY, release):
            taken.extend(run.batch)

    thread = threading.Thread(target=take_all)
    thread.start()
    jobs = [job() for _ in range(2000)]
    for older, newer in zip([None, *jobs], jobs, strict=False):
        waiting.put(newer)
        if older is not None and waiting.remove(older):
            removed.append(older)
    left = waiting.close()
    thread.join(30)
    assert len(taken) + len(removed) + len(left) == len(jobs)
    assert set(taken) | set(removed) | set(left) == set(jobs)


def partly_run_job() -> Job:
    one = job(seconds=0.4)
    one.progress = Progress(ANY, left=4)
    return one


def test_unfinished_document_returns_to_front() -> None:
    queue, long, other = JobQueue(), partly_run_job(), job()
    queue.put(long)
    run = next_run(queue)
    assert queue.state == Running(run)
    assert not queue.remove(long)
    queue.put(other)
    run.calibrated, run.unfinished = 0.1, True
    assert queue.end_run() is None
    assert queue.state == Idle(run.model)
    assert long.seconds == pytest.approx(0.3)
    assert queue._backlog.bundles[BUNDLE].chunked_nanoseconds == 300_000_000
    assert queue.close() == [long, other]


def test_cancelled_unfinished_document_is_not_requeued() -> None:
    queue, long = JobQueue(), partly_run_job()
    queue.put(long)
    run = next_run(queue)
    run.unfinished = True
    long.future.cancel()
    assert queue.end_run() is long
    assert not queue.remove(long)
    assert len(queue) == 0


def test_memory_is_released_once_when_idle() -> None:
    queue = JobQueue()
    assert queue.begin_release(release) is None
    queue.put(job())
    next_run(queue)
    assert queue.begin_release(release) is None  # a run is in progress
    queue.end_run()
    released = queue.begin_release(release)
    assert released is not None
    assert queue.state == Releasing(released)
    queue.end_run()
    assert queue.state == Idle()
    assert queue.begin_release(release) is None


@pytest.mark.parametrize("running", [False, True])
def test_replaced_models_memory_is_not_released(running: bool) -> None:
    queue, replaced = JobQueue(), make_bundle()
    queue.put(job(active=replaced))
    next_run(queue)
    if running:
        queue.forget(replaced.model)
        queue.end_run()
    else:
        queue.end_run()
        queue.forget(replaced.model)
    assert queue.state == Idle()
    assert queue.begin_release(release) is None


def test_pause_of_bundle_holds_only_its_jobs() -> None:
    queue, other = JobQueue(), make_bundle("b")
    held, free = job(), job(active=other)
    queue.put(held)
    queue.put(free)
    queue.pause(BUNDLE)
    assert take(queue) == [free]
    queue.end_run()
    queue.resume(BUNDLE)
    assert next_run(queue).model is other.model
    queue.end_run()
    assert take(queue) == [held]


def test_other_model_waits_for_release() -> None:
    queue, other = JobQueue(), make_bundle("b")
    queue.put(job())
    take(queue)
    queue.end_run()
    assert queue.state == Idle(BUNDLE.model)
    last = job(active=other)
    queue.put(last)
    released = next_run(queue)
    assert queue.state == Releasing(released)
    assert (released.model, released.batch) == (BUNDLE.model, ())
    assert len(queue) == 1
    queue.end_run()
    assert take(queue) == [last]


def finish(queue: JobQueue, run: Run, seconds: float) -> None:
    run.seconds = seconds
    queue.end_run()


def test_short_documents_outweigh_release() -> None:
    """Documents of two models alternate in the queue; each runs as long as a release."""
    queue, bundles = JobQueue(), [make_bundle(name) for name in "ab"]
    for number in range(400):
        queue.put(job(active=bundles[number % 2]))
    releases = runs = 0
    while len(queue):
        run = next_run(queue)
        runs += len(run.batch)
        releases += not run.batch
        finish(queue, run, 0.001)
    assert runs == 400
    # The first model has no release before its runs.
    assert releases <= 400 / 10 + 2


@pytest.mark.parametrize("leaves", [False, True])
def test_replaced_models_last_document_frees_memory(leaves: bool) -> None:
    """Its accepted documents still run, and its memory is released for other models until then."""
    queue, other, replaced = JobQueue(), make_bundle("b"), make_bundle()
    jobs = [job(active=replaced) for _ in range(3)]
    queue.put(jobs[0])
    next_run(queue)
    for one in jobs[1:]:
        queue.put(one)
    queue.forget(replaced.model)
    queue.end_run()
    assert queue.state == Idle(replaced.model)
    assert take(queue) == [jobs[1]]
    queue.end_run()
    assert queue.state == Idle(replaced.model)
    if leaves:
        assert queue.remove(jobs[2])
    else:
        assert take(queue) == [jobs[2]]
        queue.end_run()
    assert queue.state == Idle()
    queue.put(job(active=other))
    assert next_run(queue).model is other.model


@settings(deadline=None)
@given(
    waiting=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    arriving=st.integers(0, 2),
    run_seconds=st.floats(0.01, 1.0),
    release_seconds=st.floats(1e-5, 10.0),
)
def test_no_model_starves(
    waiting: list[int], arriving: int, run_seconds: float, release_seconds: float
) -> None:
    """One model's documents arrive faster than the engine runs them."""
    queue, bundles = JobQueue(), [make_bundle(name) for name in "abc"]
    jobs = [job(active=bundles[number]) for number in waiting]
    for one in jobs:
        queue.put(one)
    left, overtaken, turns = set(jobs), 0.0, 0
    while left:
        oldest = next(one for one in jobs if one in left)
        queue.put(job(active=bundles[arriving]))
        run = next_run(queue)
        if not run.batch:
            finish(queue, run, release_seconds)
            continue
        finish(queue, run, run_seconds)
        if oldest in run.batch:
            overtaken, turns = 0.0, turns + 1
        else:
            overtaken += run_seconds
            # The current model goes on for half a second at most, and ends its last run.
            assert overtaken <= 0.5 + run_seconds
        left -= set(run.batch)
    assert turns


DOCUMENTS = st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 10)), min_size=1, max_size=40)
"""Client and seconds of each document."""


def of(client: str, seconds: float) -> Job:
    one = job(seconds)
    one.client = client
    return one


def filled(documents: list[tuple[int, float]]) -> tuple[ClientTurns, list[Job]]:
    turns, jobs = ClientTurns(), [of(f"c{client}", s) for client, s in documents]
    for one in jobs:
        turns.append(one)
    return turns, jobs


def drained(turns: ClientTurns) -> list[Job]:
    """Run the documents one by one, and return them in the order of their runs."""
    done = list[Job]()
    while turns:
        done.append(next(iter(turns)))
        turns.begin(done[-1:])
    return done


@given(DOCUMENTS)
def test_busy_clients_get_equal_seconds(documents: list[tuple[int, float]]) -> None:
    """At any time, busy clients differ by one document of each at most."""
    turns, jobs = filled(documents)
    left, spent = Counter(one.client for one in jobs), Counter[str]()
    longest = max(one.seconds for one in jobs)
    while turns:
        one = next(iter(turns))
        turns.begin([one])
        spent[one.client] += one.seconds
        left[one.client] -= 1
        busy = [spent[client] for client in left if left[client]]
        assert not busy or max(busy) - min(busy) <= 2 * longest + 1e-6


@given(DOCUMENTS)
def test_documents_of_client_keep_order(documents: list[tuple[int, float]]) -> None:
    turns, jobs = filled(documents)
    assert len(turns) == len(jobs)
    order = list(turns)
    done = drained(turns)
    assert order == done  # nothing arrived meanwhile
    assert sorted(map(id, done)) == sorted(map(id, jobs))
    for client in {one.client for one in jobs}:
        assert [one for one in done if one.client == client] == [
            one for one in jobs if one.client == client
        ]
    assert turns._clients == {}


@given(DOCUMENTS, st.integers(0, 5), st.floats(0.01, 10))
def test_wait_is_kept_without_arrivals(
    documents: list[tuple[int, float]], client: int, seconds: float
) -> None:
    """The prediction before a document is added is the time until its turn, or a bit more."""
    turns, jobs = filled(documents)
    name = f"c{client}"
    predicted = turns.seconds_before(name, seconds, in_chunks=True)
    last = of(name, seconds)
    turns.append(last)
    done = drained(turns)
    waited = sum(one.seconds for one in done[: done.index(last)])
    others = len({one.client for one in jobs} - {name})
    longest = max(one.seconds for one in jobs)
    assert waited - 1e-6 <= predicted <= waited + others * longest + 1e-6
    assert predicted <= sum(one.seconds for one in jobs) + 1e-6


def test_light_client_overtakes_greedy_backlog() -> None:
    turns, _ = filled([(0, 1.0)] * 100)
    assert turns.seconds_before("light", 0.1, in_chunks=True) == pytest.approx(0.1)
    assert turns.seconds_before("c0", 0.1, in_chunks=True) == pytest.approx(100)
    assert turns.seconds_before("", math.inf, in_chunks=True) == pytest.approx(100)
    turns.begin([next(iter(turns))])
    light = of("light", 0.1)
    turns.append(light)
    assert next(iter(turns)) is light


def test_new_addresses_starve_no_client() -> None:
    """Two documents of clients never seen before wait at any time; one client has more before."""
    turns = ClientTurns()
    for number in range(2):
        turns.append(of(f"new{number}", 1.0))
    one = of("patient", 5.0)
    turns.append(one)
    for number in range(2, 100):
        chosen = next(iter(turns))
        turns.begin([chosen])
        if chosen is one:
            break
        assert len(turns._clients) <= 3
        turns.append(of(f"new{number}", 1.0))
    assert number <= 2 + 2 * 5


def test_synchronous_client_pays_for_long_documents() -> None:
    """A client that sends its next document after each answer gets half of the time."""
    turns, spent = ClientTurns(), Counter[str]()
    for _ in range(1000):
        turns.append(of("steady", 0.1))
    turns.append(of("sync", 1.0))
    for _ in range(200):
        chosen = next(iter(turns))
        turns.begin([chosen])
        spent[chosen.client] += chosen.seconds
        if chosen.client == "sync":
            turns.append(of("sync", 1.0))
    assert abs(spent["sync"] - spent["steady"]) <= 1.0 + 1e-6


def test_client_pays_for_whole_run() -> None:
    """A client whose requests of 32 documents share a run gets half of the time, too."""
    turns, spent = ClientTurns(), Counter[str]()
    requests = {"many": [0.1] * 32, "one": [3.0]}
    for _ in range(100):
        for client in requests.keys() - {one.client for one in turns}:
            for seconds in requests[client]:
                turns.append(of(client, seconds))
        first = next(iter(turns)).client
        batch = [one for one in turns if one.client == first]
        turns.begin(batch)
        spent[first] += sum(one.seconds for one in batch)
    assert abs(spent["many"] - spent["one"]) <= 2 * 3.2


def test_parts_of_documents_take_turns() -> None:
    """Two clients with a document in ten parts each; the part that ran is put back."""
    turns, order = ClientTurns(), list[str]()
    for client in "ab":
        one = of(client, 1.0)
        one.progress = Progress(None, left=10)  # type: ignore[arg-type]
        turns.append(one)
    while turns:
        one = next(iter(turns))
        assert one.progress is not None
        turns.begin([one])
        order.append(one.client)
        one.seconds -= one.seconds / one.progress.left
        one.progress.left -= 1
        if one.progress.left:
            turns.prepend([one])
    assert len(order) == 20
    assert all(abs(order[:n].count("a") - order[:n].count("b")) <= 2 for n in range(21))


def test_cancelled_documents_cost_nothing() -> None:
    turns, jobs = filled([(0, 1.0)] * 50 + [(1, 1.0)] * 2)
    for one in jobs[:49]:
        assert turns.remove(one)
    assert not turns.remove(jobs[0])
    assert turns.seconds_before("c0", 1.0, in_chunks=True) == pytest.approx(1 + 2)
    assert drained(turns)[:2] in ([jobs[49], jobs[50]], [jobs[50], jobs[49]])


def test_own_earlier_documents_are_left_out() -> None:
    turns, own = ClientTurns(), Backlog()
    for _ in range(10):
        one = of("a", 1.0)
        one.backlog = own
        own.count(one, 1)
        turns.append(one)
    assert turns.seconds_before("a", 1.0, besides=own, in_chunks=True) == 0
    assert turns.seconds_before("a", 1.0, in_chunks=True) == pytest.approx(10)


def test_running_parts_count_by_share() -> None:
    turns = ClientTurns()
    unfinished = ("greedy", 60.0)
    assert turns.seconds_before("a", 1.0, in_chunks=True, unfinished=unfinished) == 1.0
    assert turns.seconds_before("greedy", 1.0, in_chunks=True, unfinished=unfinished) == 60.0


@pytest.fixture
def queue() -> MeasuringQueue:
    return MeasuringQueue()


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
    run = queue.next_run()
    assert run.measures
    assert run.model is model
    assert queue.state == Measuring(run, yields=True)
    queue.end_run()
    assert queue.state == Idle(model)


def test_arriving_job_stops_measurement(queue: MeasuringQueue) -> None:
    active = queue.measured_bundle()
    spend(queue, active.model, 1.0)
    run = queue.next_run()
    assert not run.stop.is_requested
    queue.put(job())
    assert run.stop.is_requested


@pytest.mark.parametrize("models", [1, 3])
def test_waiting_jobs_leave_measurements_a_tenth(models: int, queue: MeasuringQueue) -> None:
    """Each measurement takes a second, and each job; the queue never becomes empty."""
    bundles = [queue.measured_bundle(name) for name in "abc"[:models]]
    measured = 0
    for _ in range(1000):
        queue.put(job(active=bundles[0]))
        run = queue.next_run()
        if not run.batch and not run.measures:
            queue.finish(run, 0.0)
            run = queue.next_run()
        if run.measures:
            assert queue.state == Measuring(run, yields=False)
            measured += 1
        queue.finish(run, 1.0)
    assert 95 <= measured <= 101


def test_job_does_not_stop_due_measurement(queue: MeasuringQueue) -> None:
    active = queue.measured_bundle()
    queue.now = 100.0
    run = queue.next_run()
    queue.put(job(active=active))
    assert not run.stop.is_requested


@pytest.mark.parametrize("models", [1, 3])
def test_short_gaps_complete_measurements(
    models: int, queue: MeasuringQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each measurement takes 0.4 s. A document of 1 ms arrives 70 ms after the one before."""
    bundles = [queue.measured_bundle(name, seconds=0.4) for name in "abc"[:models]]
    replace_time(monkeypatch, costs, perf_counter=lambda: queue.now)
    stops = 0
    while not all(active.model.measurement.is_done for active in bundles):
        assert queue.now < 3000
        run = queue.next_run()
        if run.measures:
            queue.arrival = lambda: queue.put(job(active=bundles[0]))
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
    assert queue.next_run().model is other.model
    queue.end_run()
    queue.pause(other)
    assert not queue.wait(0)
    queue.resume(held)
    assert queue.wait(0)


def test_forgotten_model_stops_measurement(queue: MeasuringQueue) -> None:
    old, other = queue.measured_bundle("a"), queue.measured_bundle("b")
    queue.now = 100.0
    run = queue.next_run()
    assert run.model is old.model
    queue.forget(old.model)
    assert run.stop.is_requested
    queue.end_run()
    assert queue.state == Idle()
    assert queue.next_run().model is other.model


def test_forgotten_model_leaves_others_measuring(queue: MeasuringQueue) -> None:
    other, old = queue.measured_bundle("b"), queue.measured_bundle("a")
    run = queue.next_run()
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
def test_turns_are_fair_between_models(seconds: list[float], steps: int) -> None:
    """Models with measurements of different length get equally many while documents wait."""
    queue = MeasuringQueue()
    bundles = [queue.measured_bundle(str(number)) for number in range(len(seconds))]
    counts = [0] * len(bundles)
    while sum(counts) < steps:
        queue.put(job(active=bundles[0]))
        run = queue.next_run()
        number = next(n for n, active in enumerate(bundles) if active.model is run.model)
        counts[number] += run.measures
        queue.finish(run, seconds[number] if run.measures else 0.2)
    assert max(counts) - min(counts) <= 1


def test_long_measurement_delays_no_other(
    queue: MeasuringQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step of the first model is due after 300 s, and that of the second after 1 s."""
    long, quick = queue.measured_bundle("a"), queue.measured_bundle("b")
    seconds = {long.model.measurement: 30.0, quick.model.measurement: 0.1}
    monkeypatch.setattr(CostMeasurement, "next_seconds", property(seconds.get))
    queue.now = 2.0
    queue.put(job(active=quick))
    run = queue.next_run()
    assert (run.measures, run.model) == (True, quick.model)
    queue.finish(run, 0.1)
    queue.now = 400.0
    run = queue.next_run()
    assert (run.measures, run.model) == (False, quick.model)  # the release before the long one
    queue.finish(run, 0.0)
    assert queue.next_run().model is long.model


def test_stopped_measurement_ends_turn(queue: MeasuringQueue) -> None:
    for name in "ab":
        queue.measured_bundle(name)
    run = queue.next_run()
    queue.end_run()  # without a step
    assert queue.turns.next() is not run.model
