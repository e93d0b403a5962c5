import asyncio
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftserve.scheduling.job import Job
from aftserve.scheduling.queue import Waiting

ANY: Any = object()


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def job(loop: asyncio.AbstractEventLoop, seconds: float = 0.1) -> Job:
    return Job(ANY, np.zeros(1, np.int64), seconds, 0.0, loop.create_future())


def first(jobs: Iterable[Job]) -> Sequence[Job]:
    return [next(iter(jobs))]


def test_the_oldest_comes_first_and_what_is_put_back_before_it(
    loop: asyncio.AbstractEventLoop,
) -> None:
    waiting, jobs = Waiting(), [job(loop) for _ in range(4)]
    for one in jobs[2:]:
        waiting.put(one)
    waiting.put_back(jobs[:2])
    assert [waiting.take(first)[0] for _ in jobs] == jobs


@given(st.lists(st.tuples(st.booleans(), st.floats(1e-6, 1e3)), max_size=50))
def test_its_seconds_are_those_of_its_jobs(
    loop: asyncio.AbstractEventLoop, moves: list[tuple[bool, float]]
) -> None:
    waiting, kept = Waiting(), list[Job]()
    for adds, seconds in moves:
        if adds or not kept:
            kept.append(job(loop, seconds))
            waiting.put(kept[-1])
        else:
            assert waiting.remove(kept.pop(int(seconds) % len(kept)))
        assert len(waiting) == len(kept)
        assert waiting.backlog().seconds == pytest.approx(sum(j.seconds for j in kept), abs=1e-9)
    assert waiting.close() == kept


def test_what_was_taken_cannot_be_removed(loop: asyncio.AbstractEventLoop) -> None:
    waiting, one = Waiting(), job(loop)
    waiting.put(one)
    assert waiting.take(first) == [one]
    assert not waiting.remove(one)


def test_whoever_takes_waits_for_a_job_and_for_the_end_of_a_pause(
    loop: asyncio.AbstractEventLoop,
) -> None:
    waiting, one = Waiting(), job(loop)
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(waiting.take, first)
        waiting.pause(True)
        waiting.put(one)
        time.sleep(0.05)
        assert not taken.done()
        waiting.pause(False)
        assert taken.result(30) == [one]


def test_it_tells_whether_a_job_came_and_one_that_is_paused_has(
    loop: asyncio.AbstractEventLoop,
) -> None:
    waiting, one = Waiting(), job(loop)
    assert not waiting.come(0)
    assert not waiting.come(0.01)
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(waiting.come, math.inf)
        waiting.pause(True)
        assert not came.done()
        waiting.put(one)
        assert came.result(30)
    assert waiting.come(0)
    assert waiting.remove(one)
    assert not waiting.come(0)


def test_closed_it_lets_go_of_whoever_waits(loop: asyncio.AbstractEventLoop) -> None:
    waiting, taken = Waiting(), list[Sequence[Job]]()
    thread = threading.Thread(target=lambda: taken.append(waiting.take(first)))
    thread.start()
    waiting.close()
    thread.join(30)
    assert taken == [()]
    assert waiting.come(math.inf)


def test_every_job_is_taken_or_removed_and_none_twice(loop: asyncio.AbstractEventLoop) -> None:
    waiting, taken, removed = Waiting(), list[Job](), list[Job]()

    def take() -> None:
        while batch := waiting.take(lambda jobs: list(jobs)[:3]):
            taken.extend(batch)

    thread = threading.Thread(target=take)
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
