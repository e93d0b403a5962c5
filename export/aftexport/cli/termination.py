"""SIGTERM, taken as an interrupt is."""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TerminatedError(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminable() -> Iterator[None]:
    """Lets SIGTERM end the block as an interrupt does, so that nothing half done stays behind."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    before = -math.inf

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal before
        now = time.monotonic()
        # Often it comes twice, to the process and to its group: what cleans up is left to do so.
        if now - before > 1:
            before = now
            raise TerminatedError

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
