"""Fail a run of continuous integration (CI=true) in which the whole suite takes too long.

The measure is processor time, summed over all processes: it does not depend on how busy the machine
is with other things. A test that waits costs nothing here, so `--durations` shows those.
"""

import os
import resource

import pytest
from sampling import RUN_ALL

MAX_CPU_SECONDS = 2_800
"""Two cores of an Intel Xeon with AMX take about 2,350 s for the suite with its slow tests."""
OUTPUT = "cpu seconds"


def cpu_seconds() -> float:
    """Return the processor time of this process, and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuBudget:
    """Adds up the workers' processor time; without xdist this process does their work."""

    def __init__(self) -> None:
        self.of_workers = 0.0

    @property
    def seconds(self) -> float:
        return self.of_workers or cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.of_workers += getattr(node, "workeroutput", {}).get(OUTPUT, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.seconds > MAX_CPU_SECONDS and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        line = f"{self.seconds:,.0f} s of processor time, of {MAX_CPU_SECONDS:,} s"
        if self.seconds > MAX_CPU_SECONDS:
            line = (
                f"FAILED: expected at most {MAX_CPU_SECONDS:,} s of processor time, got "
                f"{self.seconds:,.0f} s. Sample the slowest tables (tests/support/sampling.py)."
            )
        terminalreporter.write_line(line, red=self.seconds > MAX_CPU_SECONDS)


def pytest_configure(config: pytest.Config) -> None:
    """Watch the whole suite in continuous integration, but not in xdist's workers."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if (
        os.environ.get("CI") == "true"
        and whole
        and not RUN_ALL
        and not hasattr(config, "workerinput")
    ):
        config.pluginmanager.register(CpuBudget())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell xdist's controller the processor time of this worker."""
    output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[OUTPUT] = cpu_seconds()
