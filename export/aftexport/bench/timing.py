"""Measurement of the time and the memory of several contenders; apart, as it knows no models."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from aftexport.system.process import give_back

Run = Callable[[], object]

SLOW_SECONDS = 0.1
SLOW_ROUNDS = 3
FAST_SECONDS = 0.05
# OpenMP threads spin for up to this time after a call, on cores that the next call needs.
_SPINNING_SECONDS = 0.01


def sample(
    runs: Mapping[str, Run],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of calls in turn, A B C A B C: a slow phase of the machine affects all.

    A call over ``SLOW_SECONDS`` has at most ``SLOW_ROUNDS``. A contender under ``FAST_SECONDS``
    gets an extra call before each timed call: its threads are then awake and its caches full.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            least = min(seconds[name], default=0.0)
            if least > SLOW_SECONDS and len(seconds[name]) >= SLOW_ROUNDS:
                continue
            time.sleep(_SPINNING_SECONDS)
            if least < FAST_SECONDS:
                run()
            start = clock()
            run()
            seconds[name].append(clock() - start)
        advance()
    return seconds


def peak_mib(run: Run) -> float | None:
    """Return the largest growth of resident memory by ``run`` in MiB; None without /proc."""
    give_back()  # otherwise freed memory of the process would be reused without being counted
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _resident_kib("VmRSS")
    run()
    return max(_resident_kib("VmHWM") - before, 0) / 1024


def _resident_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))
