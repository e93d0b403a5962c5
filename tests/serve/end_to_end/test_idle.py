"""The memory of runs: a busy server keeps it, an idle server returns it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from clients import eventually, http, metric
from memory import NEEDS_PROC, fresh_mib, resident_mib
from servers import serving

TOKENS = 500_000
MEMORY_MIB = 160
"""Approximate memory that a run of ``TOKENS`` tokens takes."""
TOGETHER = ("--memory-budget-mib", "4096")
"""Options with which a document of ``TOKENS`` tokens does not run in chunks."""

# The engine returns memory once, after it was loaded; every later release fails.
STINGY = (
    "-c",
    """
import sys
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftserve.cli import main

release, released = OnnxRuntimeEngine.release, []

def failing(self):
    if released:
        raise EngineError("It keeps its memory.", "Leave it.")
    released.append(release(self))

OnnxRuntimeEngine.release = failing
sys.exit(main())
""",
)


def scores(address: str, tokens: int) -> dict[str, float]:
    answer = http.post(f"{address}/infer", json={"input_ids": [[7] * tokens]}, timeout=120)
    assert answer.status_code == 200
    found: dict[str, float] = answer.json()["results"][0]["scores"]
    return found


def wait_until_idle(address: str) -> None:
    eventually(lambda: metric(address, "aftserve_idle") == 1, "the server is idle")


@NEEDS_PROC
def test_idle_server_returns_run_memory(bundle_folder: Path, tmp_path: Path) -> None:
    options = (*TOGETHER, "--idle-seconds", "0.5")
    with serving(bundle_folder, tmp_path / "log", *options, measured=True) as (
        address,
        process,
    ):
        wait_until_idle(address)
        resting = resident_mib(process.pid)
        found = []
        for _ in range(2):
            before = fresh_mib(process.pid)
            found.append(scores(address, TOKENS))
            assert fresh_mib(process.pid) - before > MEMORY_MIB / 2
            wait_until_idle(address)
            assert resident_mib(process.pid) - resting < MEMORY_MIB / 2
        assert found[0] == found[1]
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


@NEEDS_PROC
def test_busy_server_keeps_run_memory(bundle_folder: Path, tmp_path: Path) -> None:
    options = (*TOGETHER, "--idle-seconds", "inf")
    with serving(bundle_folder, tmp_path / "log", *options, measured=True) as (
        address,
        process,
    ):
        resting = resident_mib(process.pid)
        scores(address, TOKENS)
        assert resident_mib(process.pid) - resting > MEMORY_MIB / 2
        before = fresh_mib(process.pid)
        for tokens in (TOKENS, 300_000, 400_000, TOKENS):
            scores(address, tokens)
        # Four runs on kept memory take less new memory than a first run.
        assert fresh_mib(process.pid) - before < MEMORY_MIB
        assert metric(address, "aftserve_idle") == 0


def test_release_after_every_run_is_harmless(bundle_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(bundle_folder, log, "--idle-seconds", "0") as (address, _):
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: scores(address, 300), range(200)))
        assert all(answer == pytest.approx(found[0], abs=1e-6) for answer in found)
        wait_until_idle(address)
        assert metric(address, "aftserve_run_documents_sum") == 200
        assert metric(address, "aftserve_failed_runs_total") == 0
    assert "Traceback" not in log.read_text("utf-8")


def test_failed_release_keeps_server_running(bundle_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(bundle_folder, log, "--idle-seconds", "0.1", program=STINGY, measured=True) as (
        address,
        _,
    ):
        wait_until_idle(address)  # after the measurement of costs
        failed = "the model model did not release its memory"
        before = log.read_text("utf-8").count(failed)
        for failures in (1, 2):
            scores(address, 300)
            eventually(
                lambda: log.read_text("utf-8").count(failed) == before + failures,  # noqa: B023
                "the release has failed",
            )
        assert http.get(f"{address}/readyz").status_code == 200
    assert "It keeps its memory" in log.read_text("utf-8")
