"""The limit of open files; each connection counts as one."""

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


def raise_limit() -> None:
    """Raise the process's limit to its maximum; shells and systemd set a lower one."""
    if resource is None:
        return
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    except (OSError, ValueError) as error:  # macOS accepts less than its own maximum
        logger.debug("the limit of open files stays: %s", error)


class DescriptorWatch:
    """A watch that logs when the limit is reached, because the system then drops connections."""

    def __init__(self) -> None:
        self._limit = math.inf
        if resource is not None:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self._limit = math.inf if limit == resource.RLIM_INFINITY else limit
        self._next = -math.inf

    def note(self, number: int) -> None:
        """Take note of a new descriptor.

        Args:
            number: number of the descriptor, which was the lowest free one.
        """
        if number < self._limit - _SPARE or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PAUSE_SECONDS
        logger.error(
            "%d files are open, the limit is %d, and each connection is one: further clients are"
            " cut off; raise the limit (ulimit -n), or let fewer connect",
            number + 1,
            self._limit,
        )
