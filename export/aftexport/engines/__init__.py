"""Runtimes behind one small interface. Only this package imports them."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import EngineError

__all__ = ["Engine", "RunStoppedError", "Stop", "Tensors"]


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
            RunStoppedError: if the request came before the block, or the block failed after it.
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


Tensors = Mapping[str, NDArray[np.generic]]
"""Arrays by name: ``input_ids`` int64 ``[B, T]``, ``lengths`` int64 ``[B]``, and the outputs."""


class Engine(Protocol):
    """A loaded model."""

    name: str
    takes_choice: bool  # whether a run takes `contract.EXPLAINED` among its inputs

    def run(
        self,
        inputs: Tensors,
        stop: Stop | None = None,  # an engine that cannot be interrupted checks it before the run
        outputs: Collection[str] | None = None,  # names of the outputs to return; None for all
    ) -> dict[str, NDArray[np.generic]]:
        """Run the model once.

        Raises:
            RunStoppedError: if ``stop`` ended it.
            EngineError: if the runtime refuses the inputs or fails.
        """
        ...

    def release(self) -> None:
        """Return the memory of earlier runs to the system; the next run allocates it again."""
        ...
