"""What the plugin library asks of a machine, and what it shows to a runtime that loads it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ..cuda import emulated

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")

BUILT = emulated.REPOSITORY / "build" / "cuda" / "tensorrt" / "libaftplugins_tensorrt.so"
SYSTEM = {"libstdc++", "libm", "libgcc_s", "libc", "libdl", "libpthread", "librt"}


@pytest.fixture(params=["emulated", "cuda"])
def checked(request: pytest.FixtureRequest) -> Path:
    if request.param == "emulated":
        return request.getfixturevalue("library")
    if not BUILT.exists():
        pytest.skip(f"no {BUILT.relative_to(emulated.REPOSITORY)} (`make cuda` builds it)")
    return BUILT


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_two_functions_are_visible(checked):
    symbols = output_of("nm", "--dynamic", "--defined-only", checked).splitlines()
    assert sorted(line.split()[-1] for line in symbols) == ["getCreators", "setLoggerFinder"]


def test_neither_tensorrt_nor_cuda_is_needed_to_load_it(checked):
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", output_of("readelf", "--dynamic", checked)))
    assert "libc" in needed
    assert {name for name in needed if not name.startswith("ld-linux")} <= SYSTEM
