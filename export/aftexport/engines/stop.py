"""Cancellation of a run from another thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aftexport.errors import EngineError


class RunStoppedError(EngineError):
    """A run was cancelled because its result was no longer needed."""

    def __init__(self) -> None:
        super().__init__("The run was stopped on request.", "Send the request again if needed.")


class Stop:
    """A request from any thread to end one run, before or during the run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requested = False
        self._end: Callable[[], None] | None = None

    @property
    def is_requested(self) -> bool:
        """Whether ``request`` was called."""
        return self._requested

    def request(self) -> None:
        """Ask the run to end; do not wait for the end."""
        with self._lock:
            self._requested = True
            if self._end is not None:
                self._end()

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` on a request while the block runs, on the thread of the request.

        Raises:
            RunStoppedError: if the request came before the block, or the block failed
                after a request.
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
