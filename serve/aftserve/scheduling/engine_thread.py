"""The thread that runs the engine, its reports to the event loop, and runs that do not end."""

import asyncio
import logging
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from aftserve.model.answers import Answer
from aftserve.scheduling.batching import Run
from aftserve.scheduling.watchdog import PARTS

logger = logging.getLogger("aftserve.scheduler")

_STALL_FACTOR = 10
_STOP_SHARE = 0.5
"""Share of the allowed delay in which a run must end after the request to stop."""


class EngineThreadError(Exception):
    """The thread that runs the engine has ended."""


class EngineThread:
    """A thread that executes runs one after the other and tells the event loop.

    There is one thread, because the engine uses every core for a run. It is a daemon, because a
    run that hangs must not keep the process alive.
    """

    def __init__(
        self,
        next_run: Callable[[], Run | None],  # waits on the thread for a run; None to end
        begun: Callable[[Run], None],  # called on the event loop at the start of every run
        ended: Callable[[], None],  # called on the event loop once the thread ends
    ) -> None:
        self._next_run = next_run
        self._begun = begun
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def _work(self) -> None:
        try:
            while (run := self._next_run()) is not None:
                self._tell(self._begun, run)
                self._answer(run)
                del run  # free its documents before the wait for the next run
        finally:
            self._tell(self._ended)

    def _answer(self, run: Run) -> None:
        answers: list[Answer] | None = []
        failure: BaseException | None = EngineThreadError("The engine's thread has ended.")
        try:
            answers = run.work()
            run.unfinished = answers is None
            failure = None
        except Exception as error:
            _clear_frames(error)
            failure = error
        finally:
            run.seconds = time.monotonic() - run.started
            self._tell(_settle, run.ended, answers, failure)
            del run, failure  # the error refers to this frame, too

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the variables of an error's frames.

    They refer to the run and its model, and the run refers to the error. Such a ring would keep the
    memory of an unloaded model until the next full garbage collection.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _settle(
    ended: "asyncio.Future[list[Answer] | None]",
    answers: list[Answer] | None,
    failure: BaseException | None,
) -> None:
    if ended.done():
        return
    if failure is None:
        ended.set_result(answers)
    else:
        ended.set_exception(failure)
        ended.exception()  # mark it as read: the scheduler may have ended


class StalledError(Exception):
    """A run goes on far beyond its prediction and cannot be stopped."""


async def wait_for_end(run: Run, stall_seconds: float) -> None:
    """Wait for the end of a run; stop it if it makes no progress.

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
