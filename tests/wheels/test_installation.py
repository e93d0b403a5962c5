"""The wheels work without a compiler, with every Python version of this machine."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import VERSIONS, interpreters

from wheels.distributions import DIST, REPOSITORY
from wheels.user import User, without_foreign_warnings

HERE = Path(__file__).parent
X86_64_WHEELS = sorted(DIST.glob("aftexport-*_x86_64.whl"))
AARCH64_WHEELS = sorted(DIST.glob("aftexport-*_aarch64.whl"))
EMULATOR = shutil.which("qemu-aarch64-static")
CONSTRAINTS = REPOSITORY / "constraints.txt"
UNPINNED = os.environ.get("UNPINNED") == "1"
WITH_TORCH = os.environ.get("TORCH") == "1"


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


@pytest.fixture
def user(version: str, pythons: dict[str, Path], tmp_path: Path) -> Iterator[User]:
    """A user with a Python version; the environment of gigabytes is removed after the test."""
    if version not in pythons:
        pytest.skip(f"no interpreter to try: Python {version} is missing or not in PYTHONS")
    yield User(pythons[version], tmp_path, newest=UNPINNED)
    shutil.rmtree(tmp_path)


@pytest.mark.skipif(not X86_64_WHEELS, reason="dist has no wheel for x86-64: run `make wheels`")
@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_runs_without_compiler(version: str, user: User, bundle_folder: Path) -> None:
    """Every command works in a fresh environment, first without torch, and none of them warns.

    With UNPINNED=1 its packages are the newest, else those of ``constraints.txt``. Only with
    TORCH=1 it gets torch, which takes a minute and gigabytes.
    """
    (wheel,) = X86_64_WHEELS
    pinned = [] if UNPINNED else ["--constraint", CONSTRAINTS]
    user.install(*pinned, f"{wheel}[cpu]")
    code = "import aftplugins, sys; print(aftplugins.library('onnxruntime'), sys.version)"
    library, _, python = user.run("python", "-c", code).partition(" ")
    assert python.startswith(f"{version}.")
    assert Path(library).is_relative_to(user.folder)
    verify_and_serve(user, bundle_folder)
    if WITH_TORCH:
        user.install(*pinned, f"{wheel}[cpu,torch]")
        export_and_fuse(user)


def export_and_fuse(user: User) -> None:
    user.run("python", HERE / "save_models.py", warns=True)  # torch.onnx warns by itself
    user.run("aftexport", "model.pt", "--to", "onnx", "--tokenizer", "bytes")
    verify_and_serve(user, "model.bundle")
    assert "AftSimple" in user.run("aftexport", "fuse", "plain.onnx", "fused.onnx")
    assert (user.folder / "fused.onnx").is_file()


def test_foreign_warnings_are_left_out() -> None:
    foreign = "/venv/site-packages/other/a.py:3: DeprecationWarning: old\n  call()\n"
    own = "/venv/site-packages/aftexport/b.py:4: FutureWarning: soon\n  use()\n"
    assert without_foreign_warnings(f"{foreign}one\n{own}{foreign}two\n") == f"one\n{own}two\n"


def verify_and_serve(user: User, bundle: Path | str) -> None:
    user.run("aftexport", "verify", bundle)
    assert re.search(r"AftSimple.*fused", user.run("aftexport", "inspect", bundle))
    answer = user.answer(bundle, "a long document")
    assert sum(answer["scores"].values()) == pytest.approx(1)


@pytest.mark.skipif(not AARCH64_WHEELS, reason="dist has no wheel for aarch64: run `make wheels`")
def test_aarch64_library_loads(tmp_path: Path) -> None:
    """An emulated aarch64's loader finds every symbol that the library needs."""
    assert EMULATOR, "expected qemu-aarch64-static; install qemu-user-static"
    shutil.unpack_archive(AARCH64_WHEELS[0], tmp_path, "zip")
    library = tmp_path / "aftplugins" / "libaftplugins_onnxruntime.so"
    program = tmp_path / "load_library"
    call("aarch64-linux-gnu-g++", HERE / "load_library.cc", "-o", program, "-ldl")
    call(EMULATOR, "-L", "/usr/aarch64-linux-gnu", program, library, "RegisterCustomOps")
