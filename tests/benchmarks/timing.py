"""The median time of each contender."""

import time
from collections.abc import Callable, Mapping
from statistics import median

from aftexport.bench.timing import Run, sample


def interleave(
    runs: Mapping[str, Run], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each contender, which take turns.

    Args:
        runs: the calls, by contender.
        rounds, clock: see ``sample``.
    """
    return {name: median(taken) for name, taken in sample(runs, rounds, clock=clock).items()}
