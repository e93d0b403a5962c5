"""Ends the process where its event loop has stopped."""

import asyncio
import faulthandler
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_BEATS = 4


@asynccontextmanager
async def watched_loop(stall_seconds: float) -> AsyncIterator[None]:
    """While the block runs, a loop that stands still ends the process with status 1.

    Nothing that runs in Python could notice: the watch is a thread of the interpreter that
    takes no lock. It writes where every thread stands to standard error.

    Args:
        stall_seconds: for which the loop may stand still.
    """
    beating = asyncio.create_task(_beat(stall_seconds))
    try:
        yield
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        faulthandler.cancel_dump_traceback_later()


async def _beat(stall_seconds: float) -> None:
    while True:
        faulthandler.dump_traceback_later(stall_seconds, exit=True)
        await asyncio.sleep(stall_seconds / _BEATS)
