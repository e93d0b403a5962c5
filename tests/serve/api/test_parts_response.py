"""A response in parts: it ends with its parts, its client, or its deadline."""

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aftserve.api.document_answers import PartsResponse


async def sent(response: PartsResponse, *, leaves: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a response to a client that stays or leaves."""
    messages = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)

    await response({"type": "http"}, receive, send)
    return messages


def bodies(messages: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in messages[1:]]


@pytest.mark.parametrize("seconds", [math.inf, 1000])
def test_all_parts_are_sent(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    response = PartsResponse(iter([b"ab", b"c"]), "text/plain", size=3, deadline=deadline)
    messages = asyncio.run(sent(response))
    assert bodies(messages) == [b"ab", b"c", b""]
    assert (b"content-length", b"3") in messages[0]["headers"]


@pytest.mark.parametrize("leaves", [False, True])
def test_deadline_or_departure_ends_parts(leaves: bool) -> None:
    made = list[int]()

    def parts() -> Iterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield b"part"

    deadline = math.inf if leaves else -math.inf
    messages = asyncio.run(
        sent(PartsResponse(parts(), "text/plain", size=4000, deadline=deadline), leaves=leaves)
    )
    # Without the last message, uvicorn closes the connection, and the client misses bytes.
    assert b"" not in bodies(messages)
    assert len(made) < 5


def test_threads_make_parts_in_order() -> None:
    """A part of many tokens would stop the event loop."""
    threads = list[int]()

    def parts() -> Iterator[bytes]:
        for number in range(20):
            threads.append(threading.get_ident())
            yield bytes([number])

    messages = asyncio.run(sent(PartsResponse(parts(), "text/plain")))
    assert bodies(messages) == [*(bytes([number]) for number in range(20)), b""]
    assert threading.get_ident() not in threads


def test_part_is_made_after_one_before_is_sent() -> None:
    made = list[int]()

    def parts() -> Iterator[bytes]:
        for number in range(10):
            made.append(number)
            yield b"part"

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        before = len(made)
        await asyncio.sleep(0.005)  # a client that reads slowly
        assert len(made) == before
        assert message["type"] == "http.response.start" or made

    asyncio.run(PartsResponse(parts(), "text/plain")({"type": "http"}, receive, send))
    assert made == [*range(10)]


def test_cancellation_does_not_wait_for_part() -> None:
    go_on, begun = threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        begun.set()
        assert go_on.wait(60)
        yield b"part"

    async def scenario() -> None:
        sending = asyncio.create_task(sent(PartsResponse(parts(), "text/plain")))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        sending.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await sending
        finally:
            go_on.set()

    asyncio.run(scenario())
