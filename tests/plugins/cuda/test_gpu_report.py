"""The record of ``make gpu-check``, which a run writes and a later run continues."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import report
from benchmarks.gpu.report import Outcome
from benchmarks.gpu.timing import COMPILED, COPY, GEMM, OURS, SDPA
from benchmarks.gpu.workloads import Workload


def test_record_of_other_software_stays(tmp_path: Path) -> None:
    """A run does not add to a record of other software."""
    report.keep(record(), tmp_path)
    kept = record()
    kept.outcomes[:] = [outcome for outcome in kept.outcomes if not outcome.skipped]
    assert report.load(record(), tmp_path) == kept  # a skipped check is tried again
    with pytest.raises(SystemExit, match=r"CUDA 13\.0"):
        report.load(replace(record(), software=["CUDA 13.1"]), tmp_path)


def record() -> report.Record:
    """Return two lengths of a memory-bound mechanism and one of an arithmetic-bound one."""
    seconds = {COPY: 1e-5, GEMM: 1e-3, OURS: 2e-5, COMPILED: 7e-5, SDPA: 1e-4}
    workloads = [
        Workload("aft_simple", 1, 1024, 512, torch.bfloat16, causal=False),
        Workload("aft_simple", 1, 4096, 512, torch.bfloat16, causal=True),
        Workload("aft_full", 1, 8192, 512, torch.bfloat16, causal=False),
    ]
    times = [
        (w, {name: taken * w.tokens / 1024 for name, taken in seconds.items()
             if name != COMPILED or not w.causal})
        for w in workloads
    ]  # fmt: skip
    return report.Record(
        "NVIDIA Sample 1000", ["CUDA 13.0"],
        [Outcome.skip("memcheck", "it is not installed", "--no-sanitizer"),
         Outcome("aft_conv", "1", False)],
        times, ["aft_full, 1,048,576 tokens: takes 6145 GiB"],
    )  # fmt: skip


def test_record_holds_checks_limits_and_ratios(tmp_path: Path) -> None:
    """The record also lists the skipped checks."""
    path = report.write(record(), tmp_path)
    assert path == tmp_path / "nvidia-sample-1000.md"
    text = path.read_text()
    assert "- memcheck: SKIPPED, it is not installed; --no-sanitizer leaves it out" in text
    assert "- aft_conv: FAILED, 1" in text
    assert "- aft_full, 1,048,576 tokens: takes 6145 GiB" in text
    simple, causal, full = text.split("\n### ")[1:]
    assert "| 1,024 | 20.0 | 50% (copy) | 3.50 | 5.00 |" in simple
    assert "torch.compile" not in causal
    assert "| 4,096 | 80.0 | 50% (copy) | 5.00 |" in causal
    # 4 T^2 D operations at the rate of 2 n^3 in 8 ms
    least = 4 * 8192**2 * 512 / (2 * 8192**3 / 8e-3)
    assert f"| 8,192 | 160.0 | {least / 160e-6:.0%} (gemm) | 3.50 | 5.00 |" in full
    assert path.with_suffix(".svg").read_text().count('<polyline class="curve"') == 5 + 4


def test_a_run_without_timing_is_recorded(tmp_path: Path) -> None:
    empty = replace(record(), times=[], left_out=[])
    assert "Nothing was timed." in report.write(empty, tmp_path).read_text()
