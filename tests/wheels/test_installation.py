"""The wheels work where there is no compiler, with every Python version of this machine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wheels.distributions import DIST

PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
HERE = Path(__file__).parent
AARCH64_WHEELS = sorted(DIST.glob("aftexport-*_aarch64.whl"))
EMULATOR = shutil.which("qemu-aarch64-static")


def interpreters() -> dict[str, str]:
    """Return the Python of each minor version in the variable PYTHONS, or of each that is here.

    Raises:
        RuntimeError: if a version in PYTHONS is not installed.
    """
    asked = os.environ.get("PYTHONS", "").split()
    found = {}
    for version in asked or ["3.11", "3.12", "3.13", "3.14"]:
        installed = [str(path) for path in PYENV.glob(f"{version}.*/bin/python")]
        if sys.version.startswith(f"{version}."):
            installed.insert(0, sys._base_executable)  # type: ignore[attr-defined]
        elif path := shutil.which(f"python{version}"):
            installed.append(path)
        if installed:
            found[version] = installed[0]
    if missing := set(asked) - found.keys():
        raise RuntimeError(
            f"expected each Python of PYTHONS, got none for {', '.join(sorted(missing))}. "
            "Install it, or leave it out of PYTHONS."
        )
    return found


PYTHONS = interpreters()


def call(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False, env=environment or None
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_runs_without_compiler(version: str, bundle_folder: Path, tmp_path: Path) -> None:
    """A bundle passes verification by the fused kernels in a fresh environment."""
    (wheel,) = DIST.glob("aftexport-*_x86_64.whl")
    call(PYTHONS[version], "-m", "venv", tmp_path / "venv")
    commands = tmp_path / "venv" / "bin"
    pip = [commands / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    call(*pip, f"{wheel}[cpu]")
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
