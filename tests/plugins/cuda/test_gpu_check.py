"""The parts of ``make gpu-check`` without a GPU: the emulated library's binding and the report."""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import replace
from enum import IntEnum
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import (
    MECHANISMS,
    accuracy,
    bindings,
    check,
    machine,
    models,
    programs,
    report,
    timing,
)
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.library import (
    CALLS,
    ExpPrecision,
    FeatureMap,
    Gate,
    Kernels,
    Normalization,
)
from benchmarks.gpu.outcome import Outcome
from benchmarks.gpu.timing import COMPILED, COPY, GEMM, OURS, SDPA
from benchmarks.gpu.workloads import EPSILON, HEADS, LAYER, WINDOW, Workload

import aftplugins
from aftexport.operators.mechanisms import OPERATORS
from aftexport.operators.registry import ALL_OPERATORS
from aftexport.parity import TOLERANCES

from . import emulated

KERNELS = (*MECHANISMS, LAYER)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SETTINGS = {
    "gate": Gate.TANH,
    "normalization": Normalization.SCALING,
    "scale": 0.25,
    "feature_map": FeatureMap.RELU,
    "eps": 0.5,
    "epsilon": 0.25,
}
"""Members of the structs at other than their usual values."""


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    if (why := emulated.missing()) is not None:
        pytest.skip(why)
    return Kernels(emulated.build() / "libaft_cuda.so")


def small(mechanism: str, precision: str = "fp32", *, causal: bool = False) -> Workload:
    return Workload(mechanism, 2, 2 * WINDOW, 8 * HEADS, DTYPES[precision], causal)


def defined(
    workload: Workload, tensors: dict[str, torch.Tensor], **settings: object
) -> torch.Tensor:
    """Compute the mechanism's operator in float64."""
    if workload.mechanism == LAYER:
        operator = ALL_OPERATORS["LayerNormFastformer"]
        inputs = [tensors["query" if name == "x" else name] for name in operator.inputs]
        doubled = [x.double() if x.is_floating_point() else x for x in inputs]
        epsilon = settings.get("epsilon", EPSILON)
        return operator.reference(*doubled, epsilon=epsilon, num_heads=HEADS)
    operator = next(
        operator
        for operator in OPERATORS.values()
        if operator.stem == workload.mechanism
        and operator.op_type.startswith("Causal") == workload.causal
    )
    attributes = {a.name: settings.get(a.name, a.default) for a in operator.attributes}
    if "num_heads" in attributes:
        attributes["num_heads"] = HEADS
    inputs = [tensors[name] for name in operator.inputs]
    doubled = [x.double() if x.is_floating_point() else x for x in inputs]
    return operator.compute(*doubled, **attributes)


def assert_close(output: torch.Tensor, expected: torch.Tensor, precision: str) -> None:
    error = (output.double() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert error < TOLERANCES[precision].bound


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("mechanism", KERNELS)
def test_binding_matches_kernel_declarations(
    kernels: Kernels, mechanism: str, precision: str
) -> None:
    workload = small(mechanism, precision)
    tensors = workload.tensors("cpu")
    tensors["lengths"] = torch.tensor([workload.tokens, 77])
    output = workload.kernel(kernels, tensors)()
    expected = defined(workload, tensors)
    assert_close(output[0], expected[0], precision)
    assert_close(output[1, :77], expected[1, :77], precision)


@pytest.mark.parametrize("mechanism", KERNELS)
def test_every_member_of_a_call_arrives(kernels: Kernels, mechanism: str) -> None:
    workload = small(mechanism, causal=mechanism != LAYER)
    tensors = workload.tensors("cpu")
    both = torch.cat((tensors["query"], tensors["value"]), 2)
    tensors["query"], tensors["value"] = both.chunk(2, 2)
    members = dict(CALLS[mechanism]._fields_)
    settings = {name: value for name, value in SETTINGS.items() if name in members}
    output = workload.kernel(kernels, tensors, **settings)()
    named = {k: v.name.lower() if isinstance(v, IntEnum) else v for k, v in settings.items()}
    assert_close(output, defined(workload, tensors, **named), "fp32")


@pytest.mark.parametrize("precision", DTYPES)
def test_aft_full_around_a_product(kernels: Kernels, precision: str) -> None:
    workload = small("aft_full", precision)
    tensors = workload.tensors("cpu")
    output = workload.product(kernels, tensors)()
    assert_close(output, defined(workload, tensors), precision)


@pytest.mark.parametrize("stem", ["linear_attention", "efficient_attention"])
def test_heads_over_kernel_maximum_are_refused(kernels: Kernels, stem: str) -> None:
    query = torch.zeros(1, 1, 257)
    own = {"linear_attention": {"feature_map": 0, "eps": 1.0},
           "efficient_attention": {"normalization": 0, "scale": 1.0}}[stem]  # fmt: skip
    call = kernels.prepare(stem, query, query, query, torch.ones(1).long(), heads=1, **own)
    with pytest.raises(RuntimeError, match=r"refused: invalid argument \(cudaError_t 1\)"):
        call()


def test_refused_call_reports_refusal(kernels: Kernels) -> None:
    workload = small("aft_full")
    run = workload.kernel(kernels, workload.tensors("cpu"), precision=ExpPrecision.BFLOAT16)
    with pytest.raises(RuntimeError, match="refused"):
        run()


@pytest.mark.parametrize("mechanism", KERNELS)
def test_timing_baselines_compute_same_results(mechanism: str) -> None:
    workload = replace(small(mechanism), tokens=5 * WINDOW)
    tensors = workload.tensors("cpu")
    output = workload.baseline()(*workload.baseline_inputs(tensors))
    assert_close(output, defined(workload, tensors), "fp32")


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


def test_sanitizer_tools_run_or_report_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "program", lambda name: None)
    absent = list(programs.sanitized(tmp_path))
    assert [outcome.what for outcome in absent] == list(programs.SANITIZERS)
    assert all(outcome.skipped for outcome in absent)
    monkeypatch.setattr(programs, "program", Path)
    runs = list(programs.sanitized(tmp_path))
    stems = {path.stem for path in programs.SOURCES.rglob("*.cu")}
    assert len(runs) == len(stems) * len(programs.SANITIZERS)


def test_kernels_need_few_packages() -> None:
    """A GPU machine has torch, NumPy and onnx, and few of the packages that this project needs."""
    absent = ("pydantic", "pydantic_core", "loky", "rich", "tensorrt", "jinja2", "filelock",
              "safetensors", "tokenizers", "matplotlib", "onnxscript", "onnx_ir")  # fmt: skip
    code = f"""
import sys
sys.modules |= dict.fromkeys({absent})
from benchmarks.gpu import bindings, check, models, programs
print(next(models.run(programs.ROOT, ["aft_simple"])))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=emulated.REPOSITORY, capture_output=True, text=True,
        timeout=120, check=False, env=os.environ | {"PYTHONPATH": "tests:export:plugins"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "exported models: SKIPPED" in done.stdout
    assert "--no-models leaves it out" in done.stdout


def test_help_needs_no_gpu_or_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-m", "benchmarks.gpu", "--help"],  # without site-packages
        cwd=emulated.REPOSITORY / "tests", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--no-models" in done.stdout


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


@pytest.mark.parametrize("mechanism", timing.LAST_ROW_SEES_ALL)
def test_last_causal_row_equals_full_row(kernels: Kernels, mechanism: str) -> None:
    causal = small(mechanism, causal=True)
    tensors = causal.tensors("cpu")
    last, whole = (
        workload.kernel(kernels, tensors)()[:, -1]
        for workload in (causal, replace(causal, causal=False))
    )
    assert_close(last, whole.double(), "fp32")


@pytest.mark.parametrize("mechanism", KERNELS)
def test_long_documents_are_compared_with_float64(kernels: Kernels, mechanism: str) -> None:
    assert accuracy.long_documents(mechanism).batch * HEADS >= 512
    outcome = accuracy.check(small(mechanism), kernels, "cpu")
    assert outcome.passed, outcome
    bound = outcome.said.rpartition(", bound ")[2]
    assert float(bound) == TOLERANCES["fp32"].bound


def test_outputs_with_missing_parts_disagree() -> None:
    workload = replace(small("aft_simple"), tokens=1 << 16)
    tensors = workload.tensors("cpu")
    inputs = workload.baseline_inputs(tensors)
    whole = workload.baseline()(*inputs)
    assert timing.disagreement("all", whole, whole) == []
    half = workload.baseline()(inputs[0], *(x[:, : 1 << 15] for x in inputs[1:]))
    assert "half is" in timing.disagreement("half", half, whole)[0]
    assert timing.disagreement("none", whole * torch.nan, whole)


class FakeGpu:
    """In the place of what ``check`` asks a GPU for; a kernel fails at ``fails`` tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.timed: list[str] = []
        self.lost = False
        self.fails = 4096
        for name, value in {
            "get_device_name": "NVIDIA Sample 1000",
            "get_device_capability": (9, 0),
            "mem_get_info": (1 << 40, 1 << 40),
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        monkeypatch.setattr(torch.cuda, "synchronize", self._synchronize)
        monkeypatch.setattr(check, "_software", lambda: ["CUDA 13.0"])
        monkeypatch.setattr(check, "Kernels", lambda path: None)
        monkeypatch.setattr(check, "measure", self._measure)
        monkeypatch.setattr(accuracy, "check", self._compare)
        monkeypatch.setattr(programs, "build", lambda capability: Path())
        shell = [programs.Program(name, (name,)) for name in ("true", "false")]
        monkeypatch.setattr(programs, "programs", lambda folder: shell)

    def _synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

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


def test_lost_gpu_ends_only_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    gpu.lost = True
    check.check(options(tmp_path, tokens=(1024, 16384)))
    assert len(gpu.timed) == 1
    text = (tmp_path / "nvidia-sample-1000.md").read_text()
    assert "- the GPU: FAILED, an illegal memory access" in text
    assert "| 16,384 | 20.0 |" in text
    gpu.lost = False
    check.check(options(tmp_path, tokens=(1024, 16384), go_on=True))
    assert "- the GPU" not in (tmp_path / "nvidia-sample-1000.md").read_text()


def test_record_of_other_software_stays(tmp_path: Path) -> None:
    """A run does not add to a record of other software."""
    report.keep(record(), tmp_path)
    kept = record()
    kept.outcomes[:] = [outcome for outcome in kept.outcomes if not outcome.skipped]
    assert report.load(record(), tmp_path) == kept  # a skipped check is tried again
    with pytest.raises(SystemExit, match=r"CUDA 13\.0"):
        report.load(replace(record(), software=["CUDA 13.1"]), tmp_path)


def test_bindings_without_gpu_name_missing_part() -> None:
    outcome = bindings.check()
    if not machine.missing():
        assert outcome.passed
    else:
        assert outcome.said


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


def test_missing_runtimes_are_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aftplugins, "__path__", aftplugins.__path__)
    monkeypatch.setenv("AFTEXPORT_CACHE", "")
    if models.lacks_tensorrt() is None:
        pytest.skip("TensorRT and a GPU are here")
    *_, last = models.run(tmp_path, ["aft_simple"])
    assert last.skipped
    assert str(last).startswith("TensorRT, float16: SKIPPED, ")
    assert "TensorRT is not installed" in str(last)
    assert last.said.endswith("--no-tensorrt leaves it out")
    left_out = ("onnxruntime", "tensorrt")
    assert list(models.run(tmp_path, ["aft_simple"], left_out=left_out)) == []


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
    assert path.with_suffix(".png").stat().st_size > 10_000


def test_a_run_without_timing_is_recorded(tmp_path: Path) -> None:
    empty = replace(record(), times=[], left_out=[])
    assert "Nothing was timed." in report.write(empty, tmp_path).read_text()
