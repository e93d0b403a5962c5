"""The clients among which the server shares its queue, its buffers and its event loop."""

import asyncio
import time
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftserve.grpc.addresses import peer_host
from aftserve.http.clients import Client, LoopTurns, SharedBytes, client_at, current_client
from aftserve.model.documents import TokenizerPool


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", "unix"),
        ("testclient", "testclient"),
    ],
)
def test_client_has_name_of_network(host: str, name: str) -> None:
    assert client_at(host).name == name


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.7:50051", "192.0.2.7"),
        ("ipv6:%5B2001:db8::1%5D:50051", "2001:db8::1"),
        ("ipv6:[::1]:50051", "::1"),
        ("unix:", ""),
        ("unix:/run/x:1", ""),
    ],
)
def test_grpc_peer_has_address(peer: str, host: str) -> None:
    assert peer_host(peer) == host


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), max_size=60))
def test_buffer_has_room_for_newcomers(requests: list[tuple[str, int]]) -> None:
    """Each request holds its bytes at once; whatever is admitted, the sum is bounded."""
    buffer, held = SharedBytes(100), list[tuple[str, int]]()
    for client, count in requests:
        if buffer.has_room(client, count):
            buffer.add(client, count)
            held.append((client, count))
        others = sum(size for name, size in held if name == client)
        assert buffer.held == sum(size for _, size in held) <= 100
        if len([name for name, _ in held if name == client]) > 1:
            assert others <= 100 - buffer.held or others <= 60 + 60
    for client, count in held:
        buffer.add(client, -count)
    assert buffer.held == 0
    assert not buffer._held_by


def test_greedy_client_leaves_third_of_room() -> None:
    buffer = SharedBytes(90)
    for client in ("a", "b", "c"):
        while buffer.has_room(client, 1):
            buffer.add(client, 1)
    assert [buffer._held_by[client] for client in ("a", "b", "c")] == [45, 22, 11]
    assert buffer.has_room("d", 12)
    assert not buffer.has_room("d", 13)


def work(steps: int, seconds: float) -> Generator[None, None, int]:
    for _ in range(steps):
        time.sleep(seconds)
        yield
    return steps


def test_other_tasks_run_between_turns() -> None:
    """Each step takes a whole turn, so the loop runs other tasks after each of all steps."""

    async def count_ticks() -> int:
        turns, ticks = LoopTurns(), 0
        works = asyncio.gather(*(turns.run(work(10, 0.002)) for _ in range(5)))
        while not works.done():
            await asyncio.sleep(0)
            ticks += 1
        assert works.result() == [10] * 5
        return ticks

    assert asyncio.run(count_ticks()) >= 50


def test_short_work_does_not_wait_for_long() -> None:
    async def order() -> list[str]:
        turns, done = LoopTurns(), list[str]()

        async def run(name: str, steps: int) -> None:
            await turns.run(work(steps, 0.002))
            done.append(name)

        await asyncio.gather(run("long", 50), run("short", 2))
        return done

    assert asyncio.run(order()) == ["short", "long"]


def test_clients_take_turns() -> None:
    """A client with one request comes after one or two of a hundred of another client."""

    async def order() -> list[str]:
        turns, done = LoopTurns(), list[str]()

        async def run(client: str) -> None:
            current_client.set(Client(client))
            await turns.take()
            done.append(client)

        await asyncio.gather(*(run("many") for _ in range(100)), run("one"))
        return done

    done = asyncio.run(order())
    assert len(done) == 101
    assert done.index("one") <= 2


@pytest.mark.parametrize("characters", [1 << 10, 1 << 17])
def test_clients_take_turns_at_threads(characters: int) -> None:
    async def order() -> list[str]:
        pool, done = TokenizerPool(LoopTurns()), list[str]()

        async def run(client: str) -> None:
            current_client.set(Client(client))
            await pool.run("a" * characters, lambda: done.append(client))

        await asyncio.gather(*(run("many") for _ in range(100)), run("one"))
        return done

    assert asyncio.run(order()).index("one") < 10


def test_cancelled_work_gives_its_turn_back() -> None:
    async def check() -> None:
        turns = LoopTurns()
        first = asyncio.create_task(turns.run(work(1000, 0.002)))
        second = asyncio.create_task(turns.run(work(1000, 0.002)))
        await asyncio.sleep(0.01)
        for task in (first, second):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await turns.run(work(3, 0)) == 3

    asyncio.run(check())
