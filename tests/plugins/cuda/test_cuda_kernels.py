"""Every CUDA kernel against its float64 definition, on an emulated GPU.

AFT_SANITIZE=thread or address,undefined builds and runs them under that sanitizer.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from . import emulated

pytestmark = pytest.mark.skipif(emulated.missing() is not None, reason=str(emulated.missing()))


@pytest.fixture(scope="module")
def programs() -> Path:
    return emulated.build(emulated.SANITIZER)


@pytest.mark.parametrize("name", ["instructions", "launch"])
def test_emulator_acts_as_gpu(programs: Path, name: str) -> None:
    done = subprocess.run([programs / f"{name}_test"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_emulator_ends_misuses(programs: Path) -> None:
    """Sanitizers find some of them first, and say so in words of their own."""
    program = programs / "misuse_test"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)

    misuses = dict(line.split("\t") for line in run().stdout.splitlines())
    assert len(misuses) > 20
    for name, message in misuses.items():
        done = run(name)
        assert done.returncode != 0, name
        assert f"FAILED: {message}" in done.stdout or "Sanitizer" in done.stderr, (name, done)


@pytest.mark.parametrize("stem", emulated.STEMS)
def test_kernel_matches_definition(
    programs: Path, stem: str, count_cases: Callable[[int, int], None]
) -> None:
    done = emulated.run(programs / f"{stem}_test", emulated.share())
    assert done.returncode == 0, done.stdout + done.stderr
    count_cases(*emulated.cases(done.stdout))
