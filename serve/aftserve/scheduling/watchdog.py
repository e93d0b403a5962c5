"""Ends the process where its event loop has stopped."""

import asyncio
import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

from aftserve.observability.output_queue import flush_output

PARTS = 8
"""A wait is taken in so many parts: of a time in which the whole process was paused, by a
signal or with its machine, no more than one counts."""
_DUMP_SECONDS = 5.0


@asynccontextmanager
async def watched_loop(stall_seconds: float) -> AsyncIterator[None]:
    """While the block runs, a loop that stands still ends the process with status 1.

    The stacks of all threads are written to standard error first, if that is read.

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
    # Not to standard error: faulthandler keeps the GIL while it waits for a full pipe.
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
