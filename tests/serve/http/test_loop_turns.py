"""Long work of several requests leaves the event loop its turns."""

import asyncio
import time
from collections.abc import Generator

import pytest

from aftserve.http.clients import Client, LoopTurns, current_client
from aftserve.model.documents import TokenizerPool


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
