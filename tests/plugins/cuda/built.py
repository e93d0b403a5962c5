"""Build the CUDA kernels for real GPUs, in build/cuda."""

import re
import subprocess
from functools import cache

from benchmarks.gpu.machine import program
from filelock import FileLock

from . import emulated

FOLDER = emulated.REPOSITORY / "build" / "cuda"
_ASKED = re.compile(r"^AFT_CUDA_ARCH:STRING=(.*)$", re.MULTILINE)


def missing() -> str | None:
    """Return the missing requirement for the build, or None."""
    return None if program("nvcc") else "no nvcc (`make cuda` installs one)"


@cache
def update() -> set[str]:
    """Build what changed, once for all processes, and return the folder's compute capabilities."""
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(FOLDER.with_suffix(".lock")):
        path = FOLDER / "CMakeCache.txt"
        asked = _ASKED.findall(path.read_text()) if path.exists() else []
        chosen = [f"AFT_CUDA_ARCH={asked[0].replace(';', ' ')}"] if asked else []
        done = subprocess.run(
            ["make", "cuda", *chosen],
            cwd=emulated.REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return set(_ASKED.findall(path.read_text())[0].split(";"))
