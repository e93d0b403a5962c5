"""How many files the process may have open: each connection is one."""

import logging
import math
import time

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

logger = logging.getLogger("aftserve.open_files")

_SPARE = 8
_PAUSE_SECONDS = 60.0


def allow_more() -> None:
    """Lets the process have as many as it may allow itself; shells and systemd give it fewer."""
    if resource is None:
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:  # macOS takes less than it says
        logger.debug("the limit of open files stays: %s", error)


class OpenFiles:
    """Says in the log where there can be no more: who connects then is cut off without a word."""

    def __init__(self) -> None:
        self._most = math.inf
        if resource is not None:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._most = math.inf if most == resource.RLIM_INFINITY else most
        self._next = -math.inf

    def note(self, number: int) -> None:
        """Takes note of a new one.

        Args:
            number: of its descriptor, the lowest that was free.
        """
        if number < self._most - _SPARE or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PAUSE_SECONDS
        logger.error(
            "%d files are open, %d may be, and each connection is one: further clients are cut off;"
            " raise the limit (ulimit -n), or let fewer connect",
            number + 1,
            self._most,
        )
