"""The memory limit of the container."""

import mmap
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Files with the limit of control groups, version 2 and 1."""


def memory_room() -> int | None:
    """Return the bytes that the limit leaves beside the memory of this process; None if unlimited.

    The result is 0 if the process has more than the limit, as shared pages may count for others.
    """
    for name in _LIMITS:
        try:
            limit = Path(name).read_text()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            continue
        if limit.strip().isdigit():  # else "max"
            return max(0, int(limit) - pages * mmap.PAGESIZE)
    return None
