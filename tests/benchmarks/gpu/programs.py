"""The C++ test programs on the GPU: instructions, kernels, TensorRT plugins, compute-sanitizer."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aftexport.parity import TOLERANCES
from benchmarks.gpu.machine import program
from benchmarks.gpu.report import Outcome

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "plugins" / "cuda"
BOUNDS = [str(TOLERANCES[precision].bound) for precision in ("fp32", "fp16", "bf16")]
SANITIZED = "12"
"""Under compute-sanitizer every so many cases: they take a hundred times as long."""
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
"""The last two see what the emulator cannot: misused barriers, and reads of unwritten memory."""
TELLING = ("FAILED", "Invalid ", "Error: ", "Warning: ")
"""In a line of a test program, or of compute-sanitizer, that says what is wrong."""
MOST_LINES = 5
MOST_SECONDS = 120.0
"""Of a program, which takes a few if nothing hangs; compute-sanitizer makes it half a minute."""


@dataclass(frozen=True)
class Program:
    """A test program: what it checks, its arguments, and variables besides this process's."""

    what: str
    command: tuple[str | Path, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def run(self, seconds: float = MOST_SECONDS) -> Outcome:
        """Runs it, for so long at most; it says last how it went and before that what was wrong."""
        with subprocess.Popen(
            list(map(str, self.command)), env=os.environ | self.environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        ) as process:  # fmt: skip
            late = ""
            try:
                printed, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                # With what it started: compute-sanitizer's child would keep the pipe open.
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate()
                late = f"not done after {seconds:.0f} s, "
        lines = printed.strip().splitlines() or ["it printed nothing"]
        if process.returncode == 0:
            return Outcome(self.what, lines[-1])
        wrong = [line for line in lines[:-1] if any(word in line for word in TELLING)][:MOST_LINES]
        said = [f"{late}exit status {process.returncode}", *wrong, lines[-1]]
        return Outcome(self.what, "; ".join(said), passed=False, printed=printed)


def build(capability: tuple[int, int]) -> Path:
    """Builds the libraries and the test programs for one architecture; returns the folder.

    Raises:
        SystemExit: where that fails, with what was printed.
    """
    folder = ROOT / "build" / "gpu-check"
    architecture = "".join(map(str, capability))
    cmake = str(program("cmake"))
    configure = [cmake, "-S", str(SOURCES), "-B", str(folder), "-DAFT_TESTS=ON"]
    if (ninja := program("ninja")) is not None:  # CMake's own choice is make
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += [
        f"-DCMAKE_CUDA_COMPILER={program('nvcc')}",
        f"-DAFT_CUDA_ARCH={architecture}",
    ]
    for command in (configure, [cmake, "--build", str(folder), "--parallel", str(os.cpu_count())]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return folder


def programs(folder: Path) -> Iterator[Program]:
    """Yield the test programs of the folder of a build."""
    tests = folder / "gpu"
    stems = _stems()
    yield Program("instructions", (tests / "instructions_test",))
    for stem in stems:
        yield Program(f"{stem}, against float64", (tests / f"{stem}_test", *BOUNDS))
    plugins = {
        "AFT_TENSORRT_LIBRARY": str(folder / "tensorrt" / "libaftplugins_tensorrt.so"),
    }
    yield Program("precision of AFT-full's plugin", (tests / "precision_test",), plugins)
    for stem in stems:
        if (host := tests / f"{stem}_through_plugin").exists():
            what = f"{stem}, through its TensorRT plugin, against float64"
            yield Program(what, (host, *BOUNDS), plugins)


def sanitized(folder: Path) -> Iterator[Program | Outcome]:
    """Yield the kernels' test programs under compute-sanitizer, or why it cannot run them."""
    path = program("compute-sanitizer")
    for tool in SANITIZERS:
        if path is None:
            yield Outcome.skip(tool, "compute-sanitizer is not installed", "--no-sanitizer")
            continue
        for stem in _stems():
            test = folder / "gpu" / f"{stem}_test"
            command = (path, "--tool", tool, "--error-exitcode", "1", test, *BOUNDS, SANITIZED)
            yield Program(f"{stem}, {tool}", command)


def _stems() -> list[str]:
    return sorted(source.stem for source in SOURCES.rglob("*.cu"))
