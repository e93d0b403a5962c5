"""Build the CUDA kernels for the emulated GPU and run their test programs."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from filelock import FileLock
from sampling import RUN_ALL

from aftexport.parity import TOLERANCES

REPOSITORY = Path(__file__).parents[3]
KERNELS = REPOSITORY / "plugins" / "cuda"
INCLUDES = (KERNELS, KERNELS.parent)
STEMS = sorted(path.stem for path in KERNELS.rglob("*.cu"))
BOUNDS = [str(TOLERANCES[precision].bound) for precision in ("fp32", "fp16", "bf16")]

SANITIZER = os.environ.get("AFT_SANITIZE", "")
# One case of so many. Under ThreadSanitizer, which looks for missing barriers, fewer tell as much.
EVERY = {"thread": 12 if RUN_ALL else 20}.get(SANITIZER, 1)
PART = 1 if RUN_ALL else 7
CASES = re.compile(r"^(\d+) of (\d+) cases, 0 failures$", re.MULTILINE)


@cache
def build(sanitizer: str = "") -> Path:
    """Build all test programs and return their folder; ``sanitizer`` as for -fsanitize.

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
    """Run a test program; it exits with 0 if the kernel was right in every case."""
    return subprocess.run(
        [program, *BOUNDS, *options], capture_output=True, text=True, timeout=300, check=False
    )


def share(every: int = 1) -> str:
    """Return the argument that makes a test program take one case of ``every``, or fewer."""
    return str(max(EVERY, every * PART))


def cases(printed: str) -> tuple[int, int]:
    """Return how many cases a program ran without a failure, and how many it has."""
    found = CASES.search(printed)
    assert found, printed
    return int(found[1]), int(found[2])


def missing() -> str | None:
    """Return the missing requirement for building the test programs, or None."""
    return None if shutil.which(os.environ.get("CXX", "g++")) else "no g++"


if __name__ == "__main__":
    build(SANITIZER)
