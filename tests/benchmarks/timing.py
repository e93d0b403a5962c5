"""The median time of each contender."""

from collections.abc import Mapping
from statistics import median

from aftexport.bench.timing import Run, sample


def interleave(runs: Mapping[str, Run], rounds: int) -> dict[str, float]:
    """The median of what ``sample`` finds, seconds by contender."""
    return {name: median(taken) for name, taken in sample(runs, rounds).items()}
