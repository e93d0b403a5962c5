"""Calls wait for bytes of the buffer in their order."""

import asyncio

import pytest

from aftserve.grpc.call import MessageBuffer


async def _settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_caller_waits_for_free_bytes() -> None:
    async def run() -> None:
        buffer = MessageBuffer(10)
        await buffer.reserve(10, "a")
        first, second = (asyncio.create_task(buffer.reserve(6, "a")) for _ in range(2))
        await _settle()
        assert not first.done()
        buffer.release(10, "a")
        await _settle()
        assert (first.done(), second.done()) == (True, False)
        buffer.release(6, "a")
        await second

    asyncio.run(run())


@pytest.mark.parametrize("is_late", [False, True])
def test_cancelled_caller_holds_no_bytes(is_late: bool) -> None:
    """The cancellation comes before the bytes, or at the same moment."""

    async def run() -> None:
        buffer = MessageBuffer(10)
        await buffer.reserve(10, "a")
        waiting = asyncio.create_task(buffer.reserve(6, "a"))
        await _settle()
        if is_late:
            buffer.release(10, "a")
            waiting.cancel()
        else:
            waiting.cancel()
            await _settle()
            buffer.release(10, "a")
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        await asyncio.wait_for(buffer.reserve(10, "a"), 5)

    asyncio.run(run())
