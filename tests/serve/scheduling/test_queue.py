"""The queue of jobs between the server and the engine's thread."""

import asyncio
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queued_jobs import ANY, BUNDLE, first, job, make_bundle, release, run_of

from aftserve.model.load import ActiveBundle
from aftserve.scheduling.batching import (
    Backlog,
    BundleBacklog,
    Idle,
    Job,
    Progress,
    Releasing,
    Run,
    Running,
)
from aftserve.scheduling.queue import JobQueue


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def make_queue() -> JobQueue:
    return JobQueue()


def next_run(queue: JobQueue) -> Run | None:
    return queue.take(first, ANY, release)


def take(queue: JobQueue) -> Sequence[Job]:
    run = next_run(queue)
    return run.batch if run else ()


def test_requeued_jobs_come_first(loop: asyncio.AbstractEventLoop) -> None:
    waiting, jobs = make_queue(), [job(loop) for _ in range(4)]
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
def test_backlog_is_exact_sum_of_jobs(
    loop: asyncio.AbstractEventLoop, moves: list[tuple[bool, int, bool, float]]
) -> None:
    """Each move adds a document of one of three bundles and two requests, or removes one."""
    waiting, kept, own = make_queue(), list[Job](), Backlog()
    bundles = [make_bundle(name) for name in "abc"]
    for adds, number, is_own, seconds in moves:
        if adds or not kept:
            kept.append(job(loop, seconds, bundles[number]))
            if is_own:
                kept[-1].backlog = own
            waiting.put(kept[-1])
        else:
            assert waiting.remove(kept.pop(int(seconds) % len(kept)))
        assert len(waiting) == waiting.backlog().documents == len(kept)
        assert waiting.backlog().bundles == parts(kept)
        assert own.bundles == parts(one for one in kept if one.backlog is own)
        others = waiting.backlog(besides=own)
        left = {active: one for active, one in others.bundles.items() if one.documents}
        assert left == parts(one for one in kept if one.backlog is not own)
        assert all(one.seconds == 0 for active, one in others.bundles.items() if active not in left)
    assert waiting.close() == kept


def test_taken_job_cannot_be_removed(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = make_queue(), job(loop)
    waiting.put(one)
    assert take(waiting) == [one]
    assert not waiting.remove(one)


def test_take_blocks_while_queue_is_paused(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = make_queue(), job(loop)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take, waiting)
        waiting.pause(BUNDLE)
        waiting.put(one)
        time.sleep(0.05)
        assert not taken.done()
        waiting.resume(BUNDLE)
        assert taken.result(30) == [one]


def test_wait_reports_jobs_despite_pause(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = make_queue(), job(loop)
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


def test_close_wakes_waiting_threads(loop: asyncio.AbstractEventLoop) -> None:
    waiting, taken = make_queue(), list[Sequence[Job]]()
    thread = threading.Thread(target=lambda: taken.append(take(waiting)))
    thread.start()
    waiting.close()
    thread.join(30)
    assert taken == [()]
    assert waiting.wait(math.inf)


def test_every_job_leaves_exactly_once(loop: asyncio.AbstractEventLoop) -> None:
    waiting, taken, removed = make_queue(), list[Job](), list[Job]()

    def take_all() -> None:
        while run := waiting.take(lambda jobs: run_of(list(jobs)[:3]), ANY, release):
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
    queue, long, other = make_queue(), partly_run_job(loop), job(loop)
    queue.put(long)
    run = next_run(queue)
    assert run is not None
    assert queue.state == Running(run)
    assert not queue.remove(long)
    queue.put(other)
    run.calibrated, run.unfinished = 0.1, True
    assert queue.end_run() is None
    assert queue.state == Idle(run.model)
    assert long.seconds == pytest.approx(0.3)
    assert queue.backlog().bundles[BUNDLE].chunked_seconds == pytest.approx(0.3)
    assert queue.close() == [long, other]


def test_cancelled_unfinished_document_is_not_requeued(loop: asyncio.AbstractEventLoop) -> None:
    queue, long = make_queue(), partly_run_job(loop)
    queue.put(long)
    run = next_run(queue)
    assert run is not None
    run.unfinished = True
    long.future.cancel()
    assert queue.end_run() is long
    assert not queue.remove(long)
    assert len(queue) == 0


def test_memory_is_released_once_when_idle(loop: asyncio.AbstractEventLoop) -> None:
    queue = make_queue()
    assert queue.begin_release(release) is None
    queue.put(job(loop))
    run = next_run(queue)
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
    queue, replaced = make_queue(), make_bundle()
    queue.put(job(loop, active=replaced))
    next_run(queue)
    if running:
        queue.forget(replaced.model)
        queue.end_run()
    else:
        queue.end_run()
        queue.forget(replaced.model)
    assert queue.state == Idle()
    assert queue.begin_release(release) is None


def test_pause_of_bundle_holds_only_its_jobs(loop: asyncio.AbstractEventLoop) -> None:
    queue, other = make_queue(), make_bundle("b")
    held, free = job(loop), job(loop, active=other)
    queue.put(held)
    queue.put(free)
    queue.pause(BUNDLE)
    assert take(queue) == [free]
    queue.end_run()
    queue.resume(BUNDLE)
    assert next_run(queue).model is other.model  # type: ignore[union-attr]
    queue.end_run()
    assert take(queue) == [held]


def test_other_model_waits_for_release(loop: asyncio.AbstractEventLoop) -> None:
    queue, other = make_queue(), make_bundle("b")
    queue.put(job(loop))
    take(queue)
    queue.end_run()
    assert queue.state == Idle(BUNDLE.model)
    last = job(loop, active=other)
    queue.put(last)
    released = next_run(queue)
    assert released is not None
    assert queue.state == Releasing(released)
    assert (released.model, released.batch) == (BUNDLE.model, ())
    assert len(queue) == 1
    queue.end_run()
    assert take(queue) == [last]


def finish(queue: JobQueue, run: Run, seconds: float) -> None:
    run.seconds = seconds
    queue.end_run()


def test_short_documents_outweigh_release(loop: asyncio.AbstractEventLoop) -> None:
    """Documents of two models alternate in the queue; each runs as long as a release."""
    queue, bundles = make_queue(), [make_bundle(name) for name in "ab"]
    for number in range(400):
        queue.put(job(loop, active=bundles[number % 2]))
    releases = runs = 0
    while len(queue):
        run = next_run(queue)
        assert run is not None
        runs += len(run.batch)
        releases += not run.batch
        finish(queue, run, 0.001)
    assert runs == 400
    # The first model has no release before its runs.
    assert releases <= 400 / 10 + 2


@pytest.mark.parametrize("leaves", [False, True])
def test_replaced_models_last_document_frees_memory(
    leaves: bool, loop: asyncio.AbstractEventLoop
) -> None:
    """Its accepted documents still run, and its memory is released for other models until then."""
    queue, other, replaced = make_queue(), make_bundle("b"), make_bundle()
    jobs = [job(loop, active=replaced) for _ in range(3)]
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
    queue.put(job(loop, active=other))
    assert next_run(queue).model is other.model  # type: ignore[union-attr]


@settings(deadline=None)
@given(
    waiting=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    arriving=st.integers(0, 2),
    run_seconds=st.floats(0.01, 1.0),
    release_seconds=st.floats(1e-5, 10.0),
)
def test_no_model_starves(
    loop: asyncio.AbstractEventLoop,
    waiting: list[int],
    arriving: int,
    run_seconds: float,
    release_seconds: float,
) -> None:
    """One model's documents arrive faster than the engine runs them."""
    queue, bundles = make_queue(), [make_bundle(name) for name in "abc"]
    jobs = [job(loop, active=bundles[number]) for number in waiting]
    for one in jobs:
        queue.put(one)
    left, overtaken, turns = set(jobs), 0.0, 0
    while left:
        oldest = next(one for one in jobs if one in left)
        queue.put(job(loop, active=bundles[arriving]))
        run = next_run(queue)
        assert run is not None
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
