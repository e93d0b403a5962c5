"""Check the resources that ptxas reports for every kernel on every architecture of build/cuda.

A kernel's occupancy is claimed by its ``__launch_bounds__(threads, blocks)``: the compiler keeps
registers within it, by spilling if it must, and the static shared memory must fit as well.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from benchmarks.gpu.occupancy import REGISTERS, SHARED, claims_of, source_of

from . import built, emulated

REPORT = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<architecture>\d+)a?'\n"
    r".*\n"
    r".* (?P<spilled>\d+) bytes spill stores.*\n"
    r".*Used (?P<registers>\d+) registers(?:.* (?P<shared>\d+) bytes smem)?"
)


class Kernel(NamedTuple):
    name: str
    architecture: str
    spilled: int
    registers: int
    shared: int


@pytest.fixture(scope="module")
def reports(architectures: set[str]) -> Path:
    assert architectures <= SHARED.keys()
    return built.FOLDER / "CMakeFiles" / "aft_cuda.dir"


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
