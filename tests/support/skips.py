"""Fail a run of continuous integration (CI=true) in which a test is skipped by accident.

``skips.toml`` lists the reasons that are allowed, each with one of the conditions below.
"""

import os
import shutil
import socket
import subprocess
import tomllib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from interpreters import VERSIONS, interpreters

LIST = Path(__file__).with_name("skips.toml")
DIST = Path(__file__).parents[2] / "dist"


def _has_compose() -> bool:
    if shutil.which("docker-compose"):
        return True
    if not shutil.which("docker"):
        return False
    words = ["docker", "compose", "version"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def _lacks(instructions: str) -> bool:
    return instructions not in Path("/proc/cpuinfo").read_text() or "AFTEXPORT_ISA" in os.environ


CONDITIONS: dict[str, Callable[[], bool]] = {
    "root": lambda: os.geteuid() == 0,
    "GPU": lambda: Path("/dev/nvidia0").exists(),
    "no GPU": lambda: not Path("/dev/nvidia0").exists(),
    "no compose": lambda: not _has_compose(),
    "no tritonserver": lambda: shutil.which("tritonserver") is None,
    "no ONNX Runtime headers": lambda: "ONNXRUNTIME_INCLUDE" not in os.environ,
    "no TensorRT headers": lambda: "TENSORRT_ROOT" not in os.environ,
    "no AVX512_BF16": lambda: _lacks("avx512_bf16"),
    "no AVX512_VNNI": lambda: _lacks("avx512_vnni"),
    "no IPv6": lambda: not socket.has_dualstack_ipv6(),
    "no wheel": lambda: not list(DIST.glob("*.whl")),
    "no x86-64 wheel": lambda: not list(DIST.glob("aftexport-*_x86_64.whl")),
    "no aarch64 wheel": lambda: not list(DIST.glob("*_aarch64.whl")),
    "not every Python": lambda: "PYTHONS" in os.environ or len(interpreters()) < len(VERSIONS),
    "no mutations": lambda: "AFT_CUDA_MUTATIONS" not in os.environ,
    "not every case": lambda: "AFT_TEST_ALL" not in os.environ,
    "sanitizer": lambda: "AFT_SANITIZE" in os.environ,
}


def allowed(reason: str) -> bool:
    """Return whether the list has a reason, and its condition holds on this machine."""
    entries = tomllib.loads(LIST.read_text("utf-8"))["skip"]
    return any(reason.startswith(e["reason"]) and CONDITIONS[e["when"]]() for e in entries)


class SkipWatch:
    """Collects the reasons of skips; under xdist its controller gets the reports of all workers."""

    def __init__(self) -> None:
        self.tests = defaultdict[str, list[str]](list)
        """The tests that are skipped, by their reason."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look(report)

    def _look(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.tests[report.longrepr[2].removeprefix("Skipped: ")].append(report.nodeid)

    def unexpected(self) -> dict[str, list[str]]:
        return {reason: tests for reason, tests in self.tests.items() if not allowed(reason)}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, tests in self.unexpected().items():
            terminalreporter.write_line(
                f"FAILED: expected every skip to be in {LIST.name} with its condition, got "
                f"{len(tests)} skipped by {reason!r}, as {tests[0]}. Install what is missing.",
                red=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    """Watch in continuous integration, but not in xdist's workers."""
    if os.environ.get("CI") == "true" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipWatch())
