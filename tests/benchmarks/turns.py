"""Contenders in processes of their own, which take turns, alone or beside a busy neighbour.

In one process they would disturb each other: threads that wait for work spin, on cores that the
next contender needs.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from statistics import median, quantiles
from typing import Any

from aftexport.bench.timing import SLOW_ROUNDS, SLOW_SECONDS, Run, peak_mib, sample
from benchmarks import setup
from benchmarks.contenders.contender import Prepared

_SPAWN = multiprocessing.get_context("spawn")
_TURN_SECONDS, _MAX_CALLS = 0.1, 20
_NEIGHBOUR_SECONDS = 0.005
"""The time that the neighbour works, and then sleeps."""

Prepare = Callable[..., tuple[Prepared | None, Any]]
"""A function that makes a contender ready, and returns facts about it or about its refusal."""


class ContenderProcess:
    """The process of one contender, which sleeps between its turns."""

    def __init__(self, threads: int) -> None:
        self._pool = ProcessPoolExecutor(1, _SPAWN, initializer=setup.prepare, initargs=(threads,))

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def prepare(self, function: Prepare, *arguments: Any) -> Any:
        """Call ``function`` in the process, and return its facts."""
        return self._pool.submit(_prepare, function, *arguments).result()

    def time(self, calls: int) -> list[float]:
        """Return the seconds of calls, after one that is not timed."""
        return self._pool.submit(_time, calls).result()

    def peak_mib(self) -> float | None:
        """Return the memory by which a call makes the process grow."""
        return self._pool.submit(_peak_mib).result()


_prepared: Prepared | None = None
"""In the process of a contender: what it runs."""


def _prepare(function: Prepare, *arguments: Any) -> Any:
    global _prepared
    _prepared = None  # the memory of the model before is free before the next is made
    _prepared, facts = function(*arguments)
    return facts


def _time(calls: int) -> list[float]:
    assert _prepared is not None
    _prepared.run()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        _prepared.run()
        seconds.append(time.perf_counter() - start)
    return seconds


def _peak_mib() -> float | None:
    assert _prepared is not None
    _prepared.release()  # the memory that was kept would not be counted
    return peak_mib(_prepared.run)


def take_turns(
    contenders: Mapping[str, ContenderProcess], limits: Mapping[str, Run], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each contender's calls, and the median seconds of each limit.

    A turn has as many calls as take a tenth of a second. The limits run in this process, in the
    same rounds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    of_limits: dict[str, list[float]] = {kind: [] for kind in limits}
    for number in range(rounds):
        for name, process in contenders.items():
            least = min(seconds[name], default=_TURN_SECONDS)
            if least <= SLOW_SECONDS or number < SLOW_ROUNDS:
                seconds[name] += process.time(max(1, min(_MAX_CALLS, int(_TURN_SECONDS / least))))
        for kind, taken in sample(limits, 1).items():
            of_limits[kind] += taken
    return seconds, {kind: median(taken) for kind, taken in of_limits.items()}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 5th and 95th percentiles of calls."""
    parts = quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 19
    return {"seconds": median(seconds), "seconds_p5": parts[0], "seconds_p95": parts[-1]}


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core half busy, as another program on the machine does."""
    process = _SPAWN.Process(target=_stay_half_busy, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _stay_half_busy() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    while True:
        end = time.perf_counter() + _NEIGHBOUR_SECONDS
        while time.perf_counter() < end:
            pass
        time.sleep(_NEIGHBOUR_SECONDS)
