"""Work for a client that ends at its deadline, or once the client disconnects."""

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Header, Request
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.types import Receive

from aftserve.errors import ClientGoneError, DeadlineError

T = TypeVar("T")

DeadlineSeconds = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | SkipJsonSchema[None],
    Header(
        alias="Deadline-Seconds",
        description="Maximum seconds until the answer; a lower limit of the server comes first.",
    ),
]


def deadline_of(request: Request, seconds: float | None, max_seconds: float) -> float:
    """Return the client's deadline by ``time.monotonic``, counted from its first byte.

    Args:
        request: a request whose headers have arrived.
        seconds: the client's own limit; None if it sent none.
        max_seconds: the server's limit.
    """
    started: float = request.state.started
    return started + min(seconds or math.inf, max_seconds)


async def run_until_disconnect(
    work: Coroutine[Any, Any, T], receive: Receive, deadline: float
) -> T:
    """Await ``work``; cancel it at the deadline, or once the client disconnects.

    Args:
        work: the work that the client asked for.
        receive: ASGI's ``receive`` of a request whose body has arrived.
        deadline: the client's deadline by ``time.monotonic``.

    Raises:
        ClientGoneError: if the client closed its connection.
        DeadlineError: if the deadline passed.
    """
    left = deadline - time.monotonic()
    working, leaving = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError if leaving.done() else DeadlineError
    finally:
        for task in (working, leaving):
            task.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until the client of a request whose body has arrived closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
