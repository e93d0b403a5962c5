"""The wheels work without a compiler, with every Python version of this machine."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from interpreters import VERSIONS, interpreters

from wheels.distributions import DIST, PURE_WHEELS, REPOSITORY

OWN_PACKAGES = ("aftexport", "aftplugins", "aftserve")
MAX_INSTALL_SECONDS = 1_800
"""Some gigabytes of torch on a slow connection."""
MAX_COMMAND_SECONDS = 300
_WARNING = re.compile(r"(?m)^(\S+\.py):\d+: \w*Warning: .*\n(?:  .*\n)?")


class User:
    """A fresh environment, a folder, and the commands that are typed there, without a compiler."""

    def __init__(self, python: Path, folder: Path, *, newest: bool = False) -> None:
        """Make the environment; the newest packages may warn of each other."""
        self.folder = folder
        self._newest = newest
        self._commands = folder / "venv" / "bin"
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        self._environment = {"PATH": str(self._commands), "HOME": str(folder)}
        assert shutil.which("c++", path=self._environment["PATH"]) is None

    def install(self, *words: str | Path) -> None:
        """Install packages from wheels; pip reads this machine's settings and cache."""
        options = ["--quiet", "--only-binary", ":all:"]
        if self._newest:  # which changes, so a cache would only grow
            options.append("--no-cache-dir")
        command = [self._commands / "python", "-m", "pip", "install", *options, *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=MAX_INSTALL_SECONDS
        )
        assert done.returncode == 0, done.stderr

    def run(self, command: str, *words: str | Path, warns: bool = False) -> str:
        """Run a command, and return its output; only if it ``warns``, stderr may have text."""
        done = subprocess.run(
            [self._commands / command, *words],
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=MAX_COMMAND_SECONDS,
        )
        assert done.returncode == 0, f"{command} {words}: {done.stdout}\n{done.stderr}"
        assert warns or not self._relevant(done.stderr), f"{command} {words}: {done.stderr}"
        return done.stdout

    def answer(self, bundle: Path | str, text: str) -> dict[str, Any]:
        """Serve a bundle, and return the answer to one document.

        The server must stop by SIGTERM with status 0, and may log only lines of level INFO.
        """
        log = self.folder / "server.log"
        with log.open("wb") as file:
            server = subprocess.Popen(
                [self._commands / "aftserve", bundle, "--port", "0"],
                cwd=self.folder,
                env=self._environment | {"AFTSERVE_DRAIN_SECONDS": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
            )
        try:
            address = _await_address(server, log)
            answer = httpx.post(f"{address}/infer", json={"text": text}, timeout=60)
        finally:
            server.terminate()
            status = server.wait(60)
        lines = self._relevant(log.read_text("utf-8")).splitlines()
        assert answer.status_code == 200, answer.text
        assert status == 0, lines
        assert not [line for line in lines if " INFO " not in line]
        content: dict[str, Any] = json.loads(answer.text)
        return content

    def _relevant(self, errors: str) -> str:
        return without_foreign_warnings(errors) if self._newest else errors


def without_foreign_warnings(text: str) -> str:
    """Return a text without the Python warnings whose line is in a file of another package."""

    def kept(found: re.Match[str]) -> str:
        is_own = any(name in OWN_PACKAGES for name in Path(found[1]).parts)
        return found[0] if is_own else ""

    return _WARNING.sub(kept, text)


def _await_address(server: "subprocess.Popen[bytes]", log: Path) -> str:
    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        if found := re.search(r"running on (http://\S+)", log.read_text("utf-8")):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(f"the server did not start: {log.read_text('utf-8')}")


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


@pytest.mark.skipif(not PURE_WHEELS, reason="dist has no wheel for all systems: run `make wheels`")
def test_pure_wheel_runs_fallbacks(
    pythons: dict[str, Path], tmp_path: Path, bundle_folder: Path
) -> None:
    """It serves without kernels and uvloop, as on Windows, and says that it has no kernels.

    Only with TORCH=1 it exports a model of each mechanism first.
    """
    user = User(next(iter(pythons.values())), tmp_path, newest=UNPINNED)
    pinned = [] if UNPINNED else ["--constraint", CONSTRAINTS]
    user.install(*pinned, f"{PURE_WHEELS[0]}[cpu{',torch' * WITH_TORCH}]")
    user.run("pip", "uninstall", "--yes", "uvloop")
    bundles = [] if WITH_TORCH else [bundle_folder]
    user.run("python", HERE / "try_pure_wheel.py", *bundles, warns=WITH_TORCH)
    shutil.rmtree(tmp_path)


@pytest.mark.skipif(not X86_64_WHEELS, reason="dist has no wheel for x86-64: run `make wheels`")
@pytest.mark.parametrize("version", VERSIONS)
def test_image_requirements_are_complete(version: str, user: User) -> None:
    """As ``docker/cpu.Dockerfile`` installs them: what is not pinned cannot be installed."""
    (wheel,) = X86_64_WHEELS
    user.install("--require-hashes", "--requirement", REPOSITORY / "docker" / "requirements.txt")
    user.install("--no-index", f"{wheel}[grpc,serve]")
    assert "No broken requirements" in user.run("python", "-m", "pip", "check")
    user.run("aftserve", "--help")


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
