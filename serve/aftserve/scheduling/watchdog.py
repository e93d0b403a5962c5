"""A watchdog that ends the process if its event loop stands still."""

import asyncio
import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from aftserve.observability.logging import flush_output

PARTS = 8
"""Number of parts of a wait. If the process or its machine is paused, the pause counts as at most
one part."""
_DUMP_SECONDS = 5.0


@asynccontextmanager
async def watched_loop(stall_seconds: float) -> AsyncIterator[None]:
    """End the process with status 1 if the event loop stands still within the block.

    The stacks of all threads are written to standard error first, if it is read.
    """
    beats, ended = threading.Event(), threading.Event()
    interval = stall_seconds / PARTS

    def watch() -> None:
        missed = 0
        while not ended.wait(interval):
            missed = 0 if beats.is_set() else missed + 1
            beats.clear()
            if missed == PARTS:
                _end_process()

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


def _end_process() -> None:
    """Dump the stacks of all threads, if they can be written, and exit."""
    try:
        # In a thread: the thread that stands still may hold a lock of the stream.
        dumping = threading.Thread(target=_dump_stacks, daemon=True)
        dumping.start()
        dumping.join(_DUMP_SECONDS)
    finally:
        os._exit(1)


def _dump_stacks() -> None:
    # Do not dump to standard error: faulthandler keeps the GIL while it waits for a full pipe.
    with _memory_file() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = file.read()
    if sys.stderr is not None:
        sys.stderr.write(stacks)
        flush_output()


def _memory_file() -> IO[str]:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("stacks"), "w+")
    return tempfile.TemporaryFile("w+")
