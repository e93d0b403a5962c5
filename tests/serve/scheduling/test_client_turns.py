"""The share of the engine that each client gets."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued_jobs import job

from aftserve.scheduling.batching import Backlog, Job, Progress
from aftserve.scheduling.queue import ClientTurns

DOCUMENTS = st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 10)), min_size=1, max_size=40)
"""Client and seconds of each document."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def of(loop: asyncio.AbstractEventLoop, client: str, seconds: float) -> Job:
    one = job(loop, seconds)
    one.client = client
    return one


def filled(
    loop: asyncio.AbstractEventLoop, documents: list[tuple[int, float]]
) -> tuple[ClientTurns, list[Job]]:
    turns, jobs = ClientTurns(), [of(loop, f"c{client}", s) for client, s in documents]
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
def test_busy_clients_get_equal_seconds(
    loop: asyncio.AbstractEventLoop, documents: list[tuple[int, float]]
) -> None:
    """At any time, busy clients differ by one document of each at most."""
    turns, jobs = filled(loop, documents)
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
def test_documents_of_client_keep_order(
    loop: asyncio.AbstractEventLoop, documents: list[tuple[int, float]]
) -> None:
    turns, jobs = filled(loop, documents)
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
    loop: asyncio.AbstractEventLoop, documents: list[tuple[int, float]], client: int, seconds: float
) -> None:
    """The prediction before a document is added is the time until its turn, or a bit more."""
    turns, jobs = filled(loop, documents)
    name = f"c{client}"
    predicted = turns.seconds_before(name, seconds, in_chunks=True)
    last = of(loop, name, seconds)
    turns.append(last)
    done = drained(turns)
    waited = sum(one.seconds for one in done[: done.index(last)])
    others = len({one.client for one in jobs} - {name})
    longest = max(one.seconds for one in jobs)
    assert waited - 1e-6 <= predicted <= waited + others * longest + 1e-6
    assert predicted <= sum(one.seconds for one in jobs) + 1e-6


def test_light_client_overtakes_greedy_backlog(loop: asyncio.AbstractEventLoop) -> None:
    turns, _ = filled(loop, [(0, 1.0)] * 100)
    assert turns.seconds_before("light", 0.1, in_chunks=True) == pytest.approx(0.1)
    assert turns.seconds_before("c0", 0.1, in_chunks=True) == pytest.approx(100)
    assert turns.seconds_before("", math.inf, in_chunks=True) == pytest.approx(100)
    turns.begin([next(iter(turns))])
    light = of(loop, "light", 0.1)
    turns.append(light)
    assert next(iter(turns)) is light


def test_new_addresses_starve_no_client(loop: asyncio.AbstractEventLoop) -> None:
    """Two documents of clients never seen before wait at any time; one client has more before."""
    turns = ClientTurns()
    for number in range(2):
        turns.append(of(loop, f"new{number}", 1.0))
    one = of(loop, "patient", 5.0)
    turns.append(one)
    for number in range(2, 100):
        chosen = next(iter(turns))
        turns.begin([chosen])
        if chosen is one:
            break
        assert len(turns._clients) <= 3
        turns.append(of(loop, f"new{number}", 1.0))
    assert number <= 2 + 2 * 5


def test_synchronous_client_pays_for_long_documents(loop: asyncio.AbstractEventLoop) -> None:
    """A client that sends its next document after each answer gets half of the time."""
    turns, spent = ClientTurns(), Counter[str]()
    for _ in range(1000):
        turns.append(of(loop, "steady", 0.1))
    turns.append(of(loop, "sync", 1.0))
    for _ in range(200):
        chosen = next(iter(turns))
        turns.begin([chosen])
        spent[chosen.client] += chosen.seconds
        if chosen.client == "sync":
            turns.append(of(loop, "sync", 1.0))
    assert abs(spent["sync"] - spent["steady"]) <= 1.0 + 1e-6


def test_client_pays_for_whole_run(loop: asyncio.AbstractEventLoop) -> None:
    """A client whose requests of 32 documents share a run gets half of the time, too."""
    turns, spent = ClientTurns(), Counter[str]()
    requests = {"many": [0.1] * 32, "one": [3.0]}
    for _ in range(100):
        for client in requests.keys() - {one.client for one in turns}:
            for seconds in requests[client]:
                turns.append(of(loop, client, seconds))
        first = next(iter(turns)).client
        batch = [one for one in turns if one.client == first]
        turns.begin(batch)
        spent[first] += sum(one.seconds for one in batch)
    assert abs(spent["many"] - spent["one"]) <= 2 * 3.2


def test_parts_of_documents_take_turns(loop: asyncio.AbstractEventLoop) -> None:
    """Two clients with a document in ten parts each; the part that ran is put back."""
    turns, order = ClientTurns(), list[str]()
    for client in "ab":
        one = of(loop, client, 1.0)
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


def test_cancelled_documents_cost_nothing(loop: asyncio.AbstractEventLoop) -> None:
    turns, jobs = filled(loop, [(0, 1.0)] * 50 + [(1, 1.0)] * 2)
    for one in jobs[:49]:
        assert turns.remove(one)
    assert not turns.remove(jobs[0])
    assert turns.seconds_before("c0", 1.0, in_chunks=True) == pytest.approx(1 + 2)
    assert drained(turns)[:2] in ([jobs[49], jobs[50]], [jobs[50], jobs[49]])


def test_own_earlier_documents_are_left_out(loop: asyncio.AbstractEventLoop) -> None:
    turns, own = ClientTurns(), Backlog()
    for _ in range(10):
        one = of(loop, "a", 1.0)
        one.backlog = own
        own.count(one, 1)
        turns.append(one)
    assert turns.seconds_before("a", 1.0, besides=own, in_chunks=True) == 0
    assert turns.seconds_before("a", 1.0, in_chunks=True) == pytest.approx(10)


def test_running_parts_count_by_share(loop: asyncio.AbstractEventLoop) -> None:
    turns = ClientTurns()
    unfinished = ("greedy", 60.0)
    assert turns.seconds_before("a", 1.0, in_chunks=True, unfinished=unfinished) == 1.0
    assert turns.seconds_before("greedy", 1.0, in_chunks=True, unfinished=unfinished) == 60.0
