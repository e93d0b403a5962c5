"""Fail a run of continuous integration (CI=true) in which the whole suite takes too long.

The measure is processor time, summed over all processes, in proportion to that of a fixed
computation between the tests. A shared machine runs both slower, by 1.6 times within one day. A
test that waits costs nothing here, so `--durations` shows those.
"""

import os
import resource
import time
from statistics import fmean

import pytest
from sampling import RUN_ALL

MAX_CPU_SECONDS = 3_600
"""The suite with its slow tests took 2,350 s on a Xeon with AMX, and 3,700 s beside other work."""
FIXED_SECONDS = 0.0075
"""The processor time of the fixed computation on that machine, while the suite runs."""
SECONDS_BETWEEN = 10.0
OUTPUT, SLOWDOWN = "cpu seconds", "slowdown"


def cpu_seconds() -> float:
    """Return the processor time of this process, and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Speed:
    """Times the fixed computation every few seconds, in each process that runs tests."""

    def __init__(self) -> None:
        self._found: list[float] = []
        self._next = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        if time.monotonic() < self._next:
            return
        start = time.process_time()
        sum(number * number for number in range(200_000))
        self._found.append(time.process_time() - start)
        self._next = time.monotonic() + SECONDS_BETWEEN

    @property
    def slowdown(self) -> float:
        """The time of the computation, in proportion to that on the first machine."""
        return fmean(self._found) / FIXED_SECONDS if self._found else 1.0


_SPEED = Speed()


def normal_seconds() -> float:
    """Return the processor time that this process would have needed on the first machine."""
    return cpu_seconds() / _SPEED.slowdown


class CpuBudget:
    """Adds up the workers' processor time; without xdist this process does their work."""

    def __init__(self) -> None:
        self.of_workers = 0.0
        self.slowdowns: list[float] = []

    @property
    def seconds(self) -> float:
        return self.of_workers or normal_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        output = getattr(node, "workeroutput", {})
        self.of_workers += output.get(OUTPUT, 0.0)
        self.slowdowns.append(output.get(SLOWDOWN, 1.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.seconds > MAX_CPU_SECONDS and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowdown = fmean(self.slowdowns or [_SPEED.slowdown])
        line = f"{self.seconds:,.0f} s of processor time, of {MAX_CPU_SECONDS:,} s"
        if self.seconds > MAX_CPU_SECONDS:
            line = (
                f"FAILED: expected at most {MAX_CPU_SECONDS:,} s of processor time, got "
                f"{self.seconds:,.0f} s. Sample the slowest tables (tests/support/sampling.py)."
            )
        line += f" The machine took {slowdown:.2f} times that."
        terminalreporter.write_line(line, red=self.seconds > MAX_CPU_SECONDS)


def pytest_configure(config: pytest.Config) -> None:
    """Watch the whole suite in continuous integration, but not in xdist's workers."""
    if os.environ.get("CI") != "true" or RUN_ALL:
        return
    config.pluginmanager.register(_SPEED)
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if whole and not hasattr(config, "workerinput"):
        config.pluginmanager.register(CpuBudget())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell xdist's controller the processor time of this worker."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[OUTPUT] = normal_seconds()
        output[SLOWDOWN] = _SPEED.slowdown
