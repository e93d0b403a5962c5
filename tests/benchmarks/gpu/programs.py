"""The C++ test programs on the GPU: instructions, kernels, TensorRT plugins, compute-sanitizer."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from aftexport.parity import TOLERANCES
from benchmarks.gpu.machine import program
from benchmarks.gpu.outcome import Outcome

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "plugins" / "cuda"
BOUNDS = [str(TOLERANCES[precision].bound) for precision in ("fp32", "fp16", "bf16")]
SANITIZED = "12"
"""Under compute-sanitizer every so many cases: they take a hundred times as long."""
MOST_LINES = 5


def build(capability: tuple[int, int]) -> Path:
    """Builds the libraries and the test programs for one architecture; returns the folder.

    Raises:
        SystemExit: where that fails, with what was printed.
    """
    folder = ROOT / "build" / "gpu-check"
    architecture = "".join(map(str, capability))
    cmake = str(program("cmake"))
    configure = [cmake, "-S", str(SOURCES), "-B", str(folder), "-DAFT_TESTS=ON"]
    configure += [
        f"-DCMAKE_CUDA_COMPILER={program('nvcc')}",
        f"-DAFT_CUDA_ARCH={architecture}",
    ]
    for command in (configure, [cmake, "--build", str(folder), "--parallel", str(os.cpu_count())]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return folder


def run(folder: Path) -> Iterator[Outcome]:
    """What is checked and what came out, as it comes.

    Args:
        folder: see ``build``.
    """
    tests = folder / "gpu"
    stems = sorted(source.stem for source in SOURCES.glob("*.cu"))
    yield outcome("instructions", tests / "instructions_test")
    for stem in stems:
        yield outcome(f"{stem}, against float64", tests / f"{stem}_test", *BOUNDS)
    plugins = {
        "AFT_TENSORRT_LIBRARY": str(folder / "tensorrt" / "libaftplugins_tensorrt.so"),
    }
    yield outcome("precision of AFT-full's plugin", tests / "precision_test", environment=plugins)
    for stem in stems:
        if (host := tests / f"{stem}_through_plugin").exists():
            what = f"{stem}, through its TensorRT plugin, against float64"
            yield outcome(what, host, *BOUNDS, environment=plugins)
    sanitizer = program("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        if sanitizer is None:
            yield Outcome(tool, "skipped, compute-sanitizer is not installed")
            continue
        for stem in stems:
            command = [sanitizer, "--tool", tool, "--error-exitcode", "1", tests / f"{stem}_test"]
            yield outcome(f"{stem}, {tool}", *command, *BOUNDS, SANITIZED)


def outcome(
    what: str, *command: str | Path, environment: Mapping[str, str] | None = None
) -> Outcome:
    """Runs a test program, which says last how it went and before that what was wrong."""
    done = subprocess.run(
        list(map(str, command)), env=os.environ | (environment or {}),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
    if done.returncode == 0:
        return Outcome(what, lines[-1])
    wrong = [line for line in lines if "FAILED" in line][:MOST_LINES]
    said = [f"exit status {done.returncode}", *wrong, lines[-1]]
    return Outcome(what, "; ".join(said), passed=False)
