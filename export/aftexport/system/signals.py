"""SIGINT and SIGTERM, which end a command and leave nothing half done behind."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came."""


def exit_status(end: KeyboardInterrupt) -> int:
    """Of a command that was ended so, as a shell gives it."""
    return 128 + (signal.SIGTERM if isinstance(end, TerminatedError) else signal.SIGINT)


class Interruption:
    """Raises where a signal ends a command."""

    def __init__(self) -> None:
        self._raised: type[KeyboardInterrupt] | None = None
        self._time = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        now = time.monotonic()
        # Often it comes twice, to the process and to its group: what cleans up is left to do so.
        if now - self._time > 1:
            self._time = now
            self._raised = TerminatedError if number == signal.SIGTERM else KeyboardInterrupt
            raise self._raised

    def check(self) -> None:
        """Raises once more what a library may have lost, in whose callback it was raised."""
        if self._raised is not None:
            raise self._raised


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """Lets both signals end the block by an exception; those that are taken otherwise stay so."""
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    in_main = threading.current_thread() is threading.main_thread()
    taken = [n for n, default in defaults.items() if in_main and signal.getsignal(n) == default]
    interruption = Interruption()
    for number in taken:
        signal.signal(number, interruption)
    try:
        yield interruption
    except KeyboardInterrupt:
        interruption.check()  # a library may have raised its own in place of ours
        raise
    finally:
        for number in taken:
            signal.signal(number, defaults[number])
