"""The default number of threads of an engine."""

import os
from pathlib import Path

import loky

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"


def usable_cores() -> int:
    """Return the number of cores for this process, by its affinity and its container's CPU quota.

    With more threads, a matrix product waits for the slowest thread. Hardware threads of one core
    count once, if Linux reports them.
    """
    allowed: int = loky.cpu_count()
    try:
        cores = {Path(_TOPOLOGY.format(n)).read_text() for n in os.sched_getaffinity(0)}
    except (AttributeError, OSError):
        return allowed
    return min(allowed, len(cores))
