"""How many threads an engine has where nobody says."""

import os
from pathlib import Path

import loky

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"


def usable_cores() -> int:
    """The cores that this process may use, by its affinity and its container's CPU quota.

    With more threads a product of matrices waits for the last of them. Hardware threads of one
    core count once, where Linux tells.
    """
    allowed: int = loky.cpu_count()
    try:
        cores = {Path(_TOPOLOGY.format(n)).read_text() for n in os.sched_getaffinity(0)}
    except (AttributeError, OSError):
        return allowed
    return min(allowed, len(cores))
