"""Ending a run early, from another thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aftexport.errors import EngineError


class RunStoppedError(EngineError):
    """A run was ended because its answer was no longer wanted."""

    def __init__(self) -> None:
        super().__init__("The run was stopped.", "Nothing: it was asked to stop.")


class Stop:
    """Ends one run, from any thread, before it begins or while it lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._end: Callable[[], None] | None = None

    @property
    def requested(self) -> bool:
        """Whether the run was asked to end."""
        return self._requested

    def request(self) -> None:
        """Asks the run to end; returns at once."""
        with self._lock:
            self._requested = True
            if self._end is not None:
                self._end()

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """For engines: while the block runs, a request calls ``end``, on its own thread.

        Raises:
            RunStoppedError: where the request was made before the block, or the block
                failed after one.
        """
        with self._lock:
            if self._requested:
                raise RunStoppedError
            self._end = end
        try:
            yield
        except Exception as error:
            if self._requested:
                raise RunStoppedError from error
            raise
        finally:
            with self._lock:
                self._end = None
