"""Check the resources that ptxas reports for every kernel on every architecture of build/cuda.

A kernel's occupancy is claimed by its ``__launch_bounds__(threads, blocks)``: the compiler keeps
registers within it, by spilling if it must, and the static shared memory must fit as well.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from . import emulated

WHEEL = [Path(place) / "nvidia" / "cu13" / "bin" / "nvcc" for place in sys.path]
NVCC = shutil.which("nvcc") or next((str(path) for path in WHEEL if path.exists()), None)

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc (`make cuda` installs one)")

REGISTERS = 64 * 1024
SHARED = {"80": 164, "86": 100, "89": 100, "90": 228, "100": 228, "120": 100}
"""Shared memory of a multiprocessor in KiB, of which each block takes one more than it uses."""

REPORT = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<architecture>\d+)a?'\n"
    r".*\n"
    r".* (?P<spilled>\d+) bytes spill stores.*\n"
    r".*Used (?P<registers>\d+) registers(?:.* (?P<shared>\d+) bytes smem)?"
)
BOUNDS = re.compile(r"__launch_bounds__\((\w+), (\d+)\)\s*(\w+)\(")


class Kernel(NamedTuple):
    name: str
    architecture: str
    spilled: int
    registers: int
    shared: int


BUILD = emulated.REPOSITORY / "build" / "cuda"


@pytest.fixture(scope="module")
def architectures() -> set[str]:
    """Return the architectures of an updated build/cuda; a new folder has all of them."""
    cache = BUILD / "CMakeCache.txt"
    pattern = re.compile(r"^AFT_CUDA_ARCH:STRING=(.*)$", re.MULTILINE)
    asked = pattern.findall(cache.read_text())[0].split(";") if cache.exists() else list(SHARED)
    command = ["make", "cuda", f"AFT_CUDA_ARCH={' '.join(asked)}"]
    done = subprocess.run(
        command, cwd=emulated.REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(asked) <= SHARED.keys()
    return set(asked)


@pytest.fixture(scope="module")
def reports(architectures: set[str]) -> Path:
    return BUILD / "CMakeFiles" / "aft_cuda.dir"


def kernels_of(report: str) -> list[Kernel]:
    return [
        Kernel(
            match["name"],
            match["architecture"],
            int(match["spilled"]),
            int(match["registers"]),
            int(match["shared"] or 0),
        )
        for match in REPORT.finditer(report)
    ]


def source_of(stem: str) -> str:
    """Return the text of the kernels' file and of the headers that it includes."""
    source = next(emulated.KERNELS.rglob(f"{stem}.cu")).read_text()
    headers = re.findall(r'#include "([\w/]+\.cuh)"', source)
    return source + "".join((emulated.KERNELS / header).read_text() for header in headers)


def claims_of(source: str) -> dict[str, tuple[int, int]]:
    """Return threads and blocks per multiprocessor by kernel name."""
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", source))
    return {
        name: (int(constants.get(threads, threads)), int(blocks))
        for threads, blocks, name in BOUNDS.findall(source)
    }


@pytest.mark.parametrize("stem", emulated.STEMS)
def test_kernels_keep_occupancy_without_spilling(
    reports: Path, architectures: set[str], stem: str
) -> None:
    source = source_of(stem)
    claims = claims_of(source)
    assert len(claims) == source.count("__global__"), "a kernel has no __launch_bounds__"
    kernels = kernels_of(next(reports.rglob(f"{stem}.cu.o.report")).read_text())
    assert {kernel.architecture for kernel in kernels} == architectures
    for name, (threads, blocks) in claims.items():
        compiled = [k for k in kernels if re.search(rf"\d{name}I?", k.name)]
        assert {k.architecture for k in compiled} == architectures, name
        for kernel in compiled:
            assert kernel.spilled == 0, kernel
            # Registers are given to warps in units of 8 a thread.
            assert -(-kernel.registers // 8) * 8 * threads * blocks <= REGISTERS, kernel
            available = SHARED[kernel.architecture] * 1024
            assert (kernel.shared + 1024) * blocks <= available, kernel
