"""Builds the CUDA kernels for the emulated GPU and runs their test programs."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from filelock import FileLock

from aftexport.parity import TOLERANCES

REPOSITORY = Path(__file__).parents[3]
KERNELS = REPOSITORY / "plugins" / "cuda"
STEMS = sorted(path.stem for path in KERNELS.rglob("*.cu"))
BOUNDS = [str(TOLERANCES[precision].bound) for precision in ("fp32", "fp16", "bf16")]

SANITIZER = os.environ.get("AFT_SANITIZE", "")
# Under ThreadSanitizer, which looks for missing barriers, fewer cases tell as much.
EVERY = {"thread": "12"}


@cache
def build(sanitizer: str = "") -> Path:
    """Builds all test programs and returns their folder; ``sanitizer`` as for -fsanitize.

    Once for all processes that run tests.
    """
    folder = REPOSITORY / "build" / "cuda-emulated" / (sanitizer.replace(",", "+") or "plain")
    tools = Path(sys.executable).parent
    configure = [tools / "cmake", "-S", Path(__file__).parent, "-B", folder, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DAFT_SANITIZE={sanitizer}"]
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "tests.lock"):
        for command in (configure, [tools / "cmake", "--build", folder]):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run(program: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a test program; it exits with 0 if the kernel was right in every case."""
    return subprocess.run(
        [program, *BOUNDS, *options], capture_output=True, text=True, timeout=300, check=False
    )


def missing() -> str | None:
    """What this machine lacks to build the test programs."""
    return None if shutil.which(os.environ.get("CXX", "g++")) else "no g++"
