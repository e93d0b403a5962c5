"""The one thread that runs the engine, and how the event loop hears of it."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from aftexport.engines import Stop
from aftserve.model.classifier import Answer, Classifier
from aftserve.scheduling.job import Job


class EngineThreadError(Exception):
    """The thread that runs the engine has ended."""


@dataclass(eq=False)
class Run:
    """One run of the engine.

    Attributes:
        batch: whose documents it answers; with none, its engine gives memory back.
        classifier: that runs them.
        calibrated: seconds its documents, or its part of one, take one by one.
        predicted: seconds it takes.
        ended: its answers, None where there are more parts to come, or the error that
            came instead; of the event loop.
        stop: ends it early.
        started: when it began, by ``time.monotonic``.
        seconds: that it took; known once it has ended.
        unfinished: whether it did one part of a document, and there are more.
    """

    batch: Sequence[Job]
    classifier: Classifier
    calibrated: float
    predicted: float
    ended: "asyncio.Future[list[Answer] | None]"
    stop: Stop = field(default_factory=Stop)
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    unfinished: bool = False

    @property
    def seconds_after(self) -> float:
        """What the parts after this one take, as calibrated."""
        if not self.batch or self.batch[0].progress is None:
            return 0.0
        return self.batch[0].seconds - self.calibrated

    def work(self) -> list[Answer] | None:
        """Runs the engine; see ``ended``."""
        if not self.batch:
            self.classifier.engine.release()
            return []
        progress = self.batch[0].progress
        if progress is None:
            return self.classifier.classify([job.ids for job in self.batch], self.stop)
        try:
            next(progress.parts)
        except StopIteration as finished:
            return [finished.value]
        finally:
            progress.left = max(1, progress.left - 1)
        return None


class EngineThread:
    """Runs what it is given, one after the other, and tells the event loop.

    One, because the engine uses every core for a run. A daemon, because a run that hangs
    must not keep the process alive.

    Args:
        next_run: called on the thread; waits for a run, None to end.
        begun: called on the event loop for every run, in time to see how it goes on.
        ended: called on the event loop once there are no more.
    """

    def __init__(
        self,
        next_run: Callable[[], Run | None],
        begun: Callable[[Run], None],
        ended: Callable[[], None],
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
                del run  # nothing of it is kept until the next one comes
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
            failure = error
        finally:
            run.seconds = time.monotonic() - run.started
            self._tell(_settle, run.ended, answers, failure)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)


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
