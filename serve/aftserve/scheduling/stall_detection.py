"""Detection of runs that make no progress."""

import asyncio
import logging

from aftserve.scheduling.engine_state import Run
from aftserve.scheduling.watchdog import PARTS

logger = logging.getLogger("aftserve.scheduler")

_STALL_FACTOR = 10
_STOP_SHARE = 0.5
"""Share of the allowed delay in which a run must end after the request to stop."""


class StalledError(Exception):
    """A run goes on far beyond its prediction and cannot be stopped."""


async def wait_for_end(run: Run, stall_seconds: float) -> None:
    """Wait for the end of a run; stop it if it makes no progress.

    Args:
        run: the current run.
        stall_seconds: allowed delay, beside ten times the predicted time.

    Raises:
        StalledError: if the run neither ends nor can be stopped.
    """
    await _wait(run, stall_seconds + _STALL_FACTOR * run.predicted)
    if not run.ended.done():
        logger.error("a run predicted to take %.3f s does not end", run.predicted)
        run.stop.request()
        await _wait(run, _STOP_SHARE * stall_seconds)
    if not run.ended.done():
        raise StalledError("A run of the engine does not end and cannot be stopped.")


async def _wait(run: Run, seconds: float) -> None:
    for _ in range(PARTS):
        if not run.ended.done():
            await asyncio.wait({run.ended}, timeout=seconds / PARTS)
