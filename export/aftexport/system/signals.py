"""SIGINT and SIGTERM, which end a command after its cleanup."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TerminatedError(KeyboardInterrupt):
    """The process received SIGTERM."""


def exit_status(end: KeyboardInterrupt) -> int:
    """Return the exit status of a command that a signal ended, by the convention of shells."""
    return 128 + (signal.SIGTERM if isinstance(end, TerminatedError) else signal.SIGINT)


class Interruption:
    """A signal handler that ends a command by an exception."""

    def __init__(self) -> None:
        self._raised: type[KeyboardInterrupt] | None = None
        self._time = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Raise the exception of a signal, once per second."""
        now = time.monotonic()
        # The signal often comes twice, to the process and to its group. The second one must not
        # interrupt the cleanup.
        if now - self._time > 1:
            self._time = now
            self._raised = TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
            raise self._raised

    def check(self) -> None:
        """Raise the exception again, since a library may have lost it in a callback."""
        if self._raised is not None:
            raise self._raised


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Let both signals end the block by an exception, unless they have other handlers."""
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    is_main = threading.current_thread() is threading.main_thread()
    handled = [n for n, default in defaults.items() if is_main and signal.getsignal(n) == default]
    interruption = Interruption()
    for number in handled:
        signal.signal(number, interruption)
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.check()  # a library may have replaced the exception by its own
        raise
    finally:
        for number in handled:
            signal.signal(number, defaults[number])
