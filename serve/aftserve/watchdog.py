"""Ends the process where its event loop has stopped."""

import asyncio
import faulthandler
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PARTS = 8
"""A wait is taken in so many parts: of a time in which the whole process was paused, by a
signal or with its machine, no more than one counts."""


@asynccontextmanager
async def watched_loop(stall_seconds: float) -> AsyncIterator[None]:
    """While the block runs, a loop that stands still ends the process with status 1.

    Where every thread stands is written to standard error first.

    Args:
        stall_seconds: for which the loop may stand still.
    """
    beats, ended = threading.Event(), threading.Event()
    interval = stall_seconds / PARTS

    def watch() -> None:
        missed = 0
        while not ended.wait(interval):
            missed = 0 if beats.is_set() else missed + 1
            beats.clear()
            if missed == PARTS:
                faulthandler.dump_traceback()
                os._exit(1)

    async def beat() -> None:
        while True:
            beats.set()
            await asyncio.sleep(interval / 2)

    beating = asyncio.create_task(beat())
    threading.Thread(target=watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        beating.cancel()
