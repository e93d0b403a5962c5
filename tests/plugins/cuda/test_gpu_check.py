"""``make gpu-check`` without a GPU: its command, programs, course of a run, and record."""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import accuracy, check, machine, models, programs, report
from benchmarks.gpu.library import Kernels
from benchmarks.gpu.report import Outcome
from benchmarks.gpu.timing import COMPILED, COPY, GEMM, OURS, SDPA
from benchmarks.gpu.workloads import Workload
from sampling import any_case

import aftplugins

from . import emulated, emulated_provider


def test_check_without_gpu_exits_with_3() -> None:
    """The program also says that it found no GPU."""
    if not machine.missing():
        pytest.skip("this machine can run the check")
    done = subprocess.run(
        ["make", "gpu-check", f"PYTHON={sys.executable}"],
        cwd=emulated.REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "gpu-check needs an NVIDIA GPU" in done.stderr
    assert "Error 3" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("outcome", "left_out", "status", "said"),
    [
        (Outcome("aft_conv", "12 cases, 0 failures"), [], 0, ""),
        (Outcome("aft_conv", "1", passed=False), [], 1, "aft_conv: FAILED, 1"),
        (Outcome.skip("memcheck", "absent", "--no-sanitizer"), [], 1, "--no-sanitizer leaves it"),
        (Outcome("aft_conv", "right"), [f"memcheck: {report.NO_TIME}"], 4, "--continue"),
    ],
)
def test_exit_status_reports_skips_and_omissions(
    outcome: Outcome,
    left_out: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = report.Record("GPU", [], [outcome], [], left_out)
    monkeypatch.setattr(machine, "missing", list)
    monkeypatch.setattr(check, "check", lambda options: found)
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--out", str(tmp_path)])
    assert command.main() == status
    assert said in capsys.readouterr().err


def test_kernels_need_few_packages() -> None:
    """A GPU machine has torch, NumPy and onnx, and few of the packages that this project needs."""
    absent = ("pydantic", "pydantic_core", "loky", "rich", "tensorrt", "jinja2", "filelock",
              "safetensors", "tokenizers", "onnxscript", "onnx_ir")  # fmt: skip
    code = f"""
import sys
sys.modules |= dict.fromkeys({absent})
from benchmarks.gpu import check, models, programs
print(next(models.run(programs.ROOT, ["aft_simple"])))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=emulated.REPOSITORY, capture_output=True, text=True,
        timeout=120, check=False, env=os.environ | {"PYTHONPATH": "tests:export:plugins"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "exported models: SKIPPED" in done.stdout
    assert "--no-models leaves it out" in done.stdout


@pytest.mark.parametrize("stem", ["aft_simple", "aft_full"])
def test_program_outcome_is_last_line(kernels: Kernels, stem: str) -> None:
    program = emulated.build() / f"{stem}_test"
    right = programs.Program(stem, (program, *programs.BOUNDS, "12")).run()
    assert right.passed
    assert "cases, 0 failures" in right.said
    wrong = programs.Program(stem, (program, "1e-12", "1e-12", "1e-12", "12")).run()
    assert not wrong.passed
    assert wrong.printed.count("FAILED") > programs.MOST_LINES
    assert str(wrong).startswith(f"{stem}: FAILED, exit status 1; FAILED: case")


def test_hanging_program_is_stopped_with_children() -> None:
    begun = time.monotonic()
    said = programs.Program("hangs", ("sh", "-c", "echo begun; sleep 600; true")).run(0.5)
    assert time.monotonic() - begun < 300
    assert str(said) == "hangs: FAILED, not done after 0 s, exit status -9; begun"


class FakeGpu:
    """In the place of what ``check`` asks a GPU for; a kernel fails at ``fails`` tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timed: list[str] = []
        self.fails = 4096
        for name, value in {
            "get_device_name": "NVIDIA Sample 1000",
            "get_device_capability": (9, 0),
            "mem_get_info": (1 << 40, 1 << 40),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(check, "_software", lambda: ["CUDA 13.0"])
        monkeypatch.setattr(check, "Kernels", lambda path: None)
        monkeypatch.setattr(check, "measure", self._measure)
        monkeypatch.setattr(accuracy, "check", self._compare)
        monkeypatch.setattr(programs, "build", lambda capability: Path())
        shell = [programs.Program(name, (name,)) for name in ("true", "false")]
        monkeypatch.setattr(programs, "programs", lambda folder: shell)

    def _compare(self, workload: Workload, kernels: None) -> Outcome:
        if workload.mechanism == "aft_full":
            raise RuntimeError("no memory")
        return Outcome(accuracy.title(workload), "error 0")

    def _measure(
        self, workload: Workload, kernels: None, rounds: int
    ) -> tuple[dict[str, float], list[str], list[str]]:
        self.timed.append(str(workload))
        if workload.tokens == self.fails:
            raise RuntimeError("no kernel image")
        return {COPY: 1e-5, GEMM: 1e-3, OURS: 2e-5}, [f"{workload}: flash SDPA, no"], []


def options(
    folder: Path, *, tokens: tuple[int, ...], go_on: bool = False, seconds: float | None = None
) -> argparse.Namespace:
    return argparse.Namespace(
        mechanism=["aft_simple"], tokens=tokens, batch=1, dim=64, rounds=1, no_kernels=False,
        no_sanitizer=True, no_timing=False, no_models=True, no_bindings=True,
        no_onnxruntime=False, no_tensorrt=False, out=folder, go_on=go_on, seconds=seconds,
    )  # fmt: skip


def test_failure_is_isolated_and_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure takes nothing else with it, and a run goes on where the last one ended."""
    gpu = FakeGpu(monkeypatch)
    found = check.check(options(tmp_path, tokens=(1024, 4096, 16384)))
    assert {outcome.what for outcome in found.outcomes if not outcome.passed} >= {"false"}
    assert len(gpu.timed) == 6
    text = (tmp_path / "nvidia-sample-1000.md").read_text()
    assert "- true: it printed nothing" in text
    assert "- false: FAILED" in text
    assert "4,096 tokens: FAILED, RuntimeError: no kernel image" in text
    assert "| 16,384 | 20.0 |" in text
    assert "16,384 tokens, float32, against float64 in PyTorch: error 0" in text
    assert "no kernel image" in (tmp_path / "nvidia-sample-1000.log").read_text()
    gpu.timed.clear()
    gpu.fails = 0
    check.check(options(tmp_path, tokens=(1024, 4096, 65536), go_on=True))
    assert [int(name.split()[-2].replace(",", "")) for name in gpu.timed] == 2 * [4096, 65536]
    text = (tmp_path / "nvidia-sample-1000.md").read_text()
    assert "no kernel image" not in text
    assert text.count("- true:") == text.count("- false:") == 1
    assert text.count("| 1,024 |") == text.count("| 65,536 |") == 2


def test_time_limit_stops_new_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run also reports it."""
    gpu = FakeGpu(monkeypatch)
    check.check(options(tmp_path, tokens=(1024,), seconds=1e-9))
    assert gpu.timed == []
    path = tmp_path / "nvidia-sample-1000.md"
    assert f"- timing of aft_simple, 1,024 tokens: {report.NO_TIME}" in path.read_text()
    check.check(options(tmp_path, tokens=(1024,), go_on=True))
    assert len(gpu.timed) == 2
    assert report.NO_TIME not in path.read_text()


@pytest.mark.table(keep=0.5, by=any_case)
@pytest.mark.parametrize("mechanism", ["aft_full", "fastformer"])
def test_kernel_verifies_exported_model(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "TOKENS", 128)
    monkeypatch.setattr(
        models, "CONFIG", models.CONFIG | {"dim": 16, "depth": 1, "max_length": 128}
    )
    way = partial(models.in_onnxruntime, mechanism, precision="fp16", provider="cpu")
    right = models.outcome(mechanism, way)
    assert right.passed, right
    assert "cases, error" in right.said
    monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, "1")
    assert "a kernel was not used: " in str(models.outcome(mechanism, way))


def test_bundles_from_elsewhere_are_verified(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a provider that is emulated; a missing one is named."""
    monkeypatch.setattr(aftplugins, "__path__", aftplugins.__path__)
    monkeypatch.setenv("AFTEXPORT_CACHE", "")
    (skipped,) = models.run_bundles(tmp_path, bundle_folder.parent)
    assert skipped.skipped == (models._lacks_onnxruntime() is not None)
    monkeypatch.setattr(models, "_lacks_onnxruntime", lambda: None)
    emulated_provider.use(emulated.build() / emulated_provider.LIBRARY, monkeypatch)
    (right,) = models.run_bundles(tmp_path, bundle_folder.parent)
    assert right.passed, right
    assert right.what == "model.bundle in ONNX Runtime, CUDA provider"
    assert "AftSimple fused" in right.said
    (empty,) = models.run_bundles(tmp_path, tmp_path)
    assert not empty.passed


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
