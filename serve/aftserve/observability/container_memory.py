"""What a container lets this process have of memory."""

import mmap
from pathlib import Path

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Of control groups, version 2 and 1."""


def memory_room() -> int | None:
    """Bytes that its limit leaves beside what the process has; None where nothing bounds it.

    None are left where the process has more: pages that it shares may count for others.
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
