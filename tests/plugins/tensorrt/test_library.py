"""The libraries that the plugin library needs, and the symbols that it exports."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")

SYSTEM = {"libstdc++", "libm", "libgcc_s", "libc", "libdl", "libpthread", "librt"}
EMULATED = {"libemulator"}
"""The library of the emulated GPU, which only the tests' own plugin library needs."""


def output_of(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_two_functions_are_visible(each_library: Path) -> None:
    symbols = output_of("nm", "--dynamic", "--defined-only", each_library).splitlines()
    assert sorted(line.split()[-1] for line in symbols) == ["getCreators", "setLoggerFinder"]


def test_library_loads_without_tensorrt_or_cuda(each_library: Path) -> None:
    entries = output_of("readelf", "--dynamic", each_library)
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", entries))
    assert "libc" in needed
    assert {name for name in needed if not name.startswith("ld-linux")} <= SYSTEM | EMULATED
