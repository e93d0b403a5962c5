"""The one thread that runs the engine, and how the event loop waits for it."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class EngineThreadError(Exception):
    """The thread that runs the engine has ended."""


class EngineThread:
    """Runs calls in a thread of its own, one after the other.

    One, because the engine uses every core for a run. A daemon, because a run that hangs
    must not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None]
        self._calls = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._pending: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> "asyncio.Future[T]":
        """A future of what ``call`` returns or raises; EngineThreadError if the thread ends."""
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._thread.is_alive():
            future.set_exception(EngineThreadError("The engine's thread has ended."))
            return future
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """Lets the thread end after the call that is running."""
        self._calls.put(None)

    def _work(self) -> None:
        try:
            while (item := self._calls.get()) is not None:
                self._run(*item)
                del item  # nothing of a call is kept until the next one comes
        finally:
            self._tell(self._fail_pending)

    def _run(self, call: Callable[[], Any], future: "asyncio.Future[Any]") -> None:
        try:
            result = call()
        except Exception as error:
            self._tell(_fail, future, error)
        else:
            self._tell(_succeed, future, result)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _fail_pending(self) -> None:
        for future in tuple(self._pending):
            _fail(future, EngineThreadError("The engine's thread has ended."))


def _succeed(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
