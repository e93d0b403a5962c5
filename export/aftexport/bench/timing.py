"""Timing several ways to do one thing, and the memory that each takes."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from aftexport.system.memory import give_back

Run = Callable[[], object]

SLOW_SECONDS = 0.1
SLOW_ROUNDS = 3
FAST_SECONDS = 0.05
# The threads of OpenMP spin for up to this long after a call, on cores the next one needs.
_SPINNING_SECONDS = 0.01


def sample(
    runs: Mapping[str, Run], rounds: int, advance: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Times contenders in turn, A B C A B C, so that a slow moment of the machine hits all alike.

    Args:
        runs: by contender; each was called before, so that it is compiled.
        rounds: timed calls of each; ``SLOW_ROUNDS`` at most where one takes over
            ``SLOW_SECONDS``. Before each, one that takes under ``FAST_SECONDS`` is called
            once more: it finds its threads awake and its caches full, as in steady use.
        advance: called after every round.

    Returns:
        Seconds of each call, by contender.
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
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        advance()
    return seconds


def peak_mib(run: Run) -> float | None:
    """MiB by which resident memory rose during ``run``, at its highest, above where it stood.

    None where the kernel keeps no such count: it takes Linux and its ``/proc``.
    """
    give_back()  # memory that was freed but kept would be used again without being counted
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
