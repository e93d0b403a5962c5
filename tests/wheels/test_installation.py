"""The wheels work without a compiler, with every Python version of this machine."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from interpreters import VERSIONS, interpreters

from wheels.distributions import DIST, REPOSITORY

HERE = Path(__file__).parent
X86_64_WHEELS = sorted(DIST.glob("aftexport-*_x86_64.whl"))
AARCH64_WHEELS = sorted(DIST.glob("aftexport-*_aarch64.whl"))
EMULATOR = shutil.which("qemu-aarch64-static")
CONSTRAINTS = REPOSITORY / "constraints.txt"


@pytest.fixture(scope="module")
def pythons() -> dict[str, Path]:
    """The interpreter of each version in the variable PYTHONS, or of each that is installed."""
    return interpreters(os.environ.get("PYTHONS", "").split())


def call(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, env=environment or None
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.skipif(not X86_64_WHEELS, reason="dist has no wheel for x86-64: run `make wheels`")
@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_runs_without_compiler(
    version: str, pythons: dict[str, Path], bundle_folder: Path, tmp_path: Path
) -> None:
    """A bundle passes verification by the fused kernels in a fresh environment.

    With UNPINNED=1 its packages are the newest, else those of ``constraints.txt``.
    """
    if version not in pythons:
        pytest.skip(f"no interpreter to try: Python {version} is missing or not in PYTHONS")
    (wheel,) = X86_64_WHEELS
    call(pythons[version], "-m", "venv", tmp_path / "venv")
    commands = tmp_path / "venv" / "bin"
    pip = [commands / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    pinned = [] if os.environ.get("UNPINNED") == "1" else ["--constraint", CONSTRAINTS]
    call(*pip, *pinned, f"{wheel}[cpu]")
    bare = {"PATH": str(commands), "HOME": str(tmp_path)}
    assert shutil.which("c++", path=bare["PATH"]) is None
    code = "import aftplugins, sys; print(aftplugins.library('onnxruntime'), sys.version)"
    library, _, python = call(commands / "python", "-c", code, **bare).partition(" ")
    assert python.startswith(f"{version}.")
    assert Path(library).is_relative_to(tmp_path)
    call(commands / "aftexport", "verify", bundle_folder, **bare)
    assert re.search(
        r"AftSimple.*fused", call(commands / "aftexport", "inspect", bundle_folder, **bare)
    )


@pytest.mark.skipif(not AARCH64_WHEELS, reason="dist has no wheel for aarch64: run `make wheels`")
def test_aarch64_library_loads(tmp_path: Path) -> None:
    """An emulated aarch64's loader finds every symbol that the library needs."""
    assert EMULATOR, "expected qemu-aarch64-static; install qemu-user-static"
    shutil.unpack_archive(AARCH64_WHEELS[0], tmp_path, "zip")
    library = tmp_path / "aftplugins" / "libaftplugins_onnxruntime.so"
    program = tmp_path / "load_library"
    call("aarch64-linux-gnu-g++", HERE / "load_library.cc", "-o", program, "-ldl")
    call(EMULATOR, "-L", "/usr/aarch64-linux-gnu", program, library, "RegisterCustomOps")
