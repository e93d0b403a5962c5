"""Working for a client only while it is there and its deadline has not passed."""

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Header, Request
from starlette.types import Receive

from aftserve.errors import ClientGoneError, DeadlineError

T = TypeVar("T")

DeadlineSeconds = Annotated[
    float | None,
    Header(
        alias="Deadline-Seconds",
        gt=0,
        allow_inf_nan=False,
        description="Most seconds until the answer; the server's limit comes first.",
    ),
]


def deadline_of(request: Request, seconds: float | None, most: float) -> float:
    """When the client wants its answer, by ``time.monotonic``; it waits from its first byte.

    Args:
        request: whose headers have arrived.
        seconds: that the client gives it; None where it does not say.
        most: that the server gives it.
    """
    started: float = request.state.started
    return started + min(seconds or math.inf, most)


async def while_wanted(work: Coroutine[Any, Any, T], receive: Receive, deadline: float) -> T:
    """Awaits ``work``; cancels it once nobody wants the result any more.

    Args:
        work: what the client asked for.
        receive: of a request whose body was received.
        deadline: by ``time.monotonic``.

    Raises:
        ClientGoneError: where the client closed its connection.
        DeadlineError: where the deadline passed.
    """
    left = deadline - time.monotonic()
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError if leaving.done() else DeadlineError
    finally:
        for task in (working, leaving):
            task.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
