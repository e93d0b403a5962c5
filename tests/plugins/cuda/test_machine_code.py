"""Compare the machine code of build/cuda with the table in machine_code, without a GPU."""

import pytest
from benchmarks.gpu.disassembly import LIBRARY

from . import machine_code
from .machine_code import ARCHITECTURES, Line

WRITE = "`make cuda` for all architectures, then `python -m plugins.cuda.machine_code`"


def lines_of(architectures: set[str], architecture: str) -> dict[str, Line]:
    if architecture not in architectures:
        pytest.skip(f"build/cuda has no code for sm_{architecture}")
    return {line.kernel: line for line in machine_code.measure(LIBRARY, architecture)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_machine_code_is_no_worse(architectures: set[str], architecture: str) -> None:
    lines = lines_of(architectures, architecture)
    table = {line.kernel: line for line in machine_code.read(architecture)}
    assert lines.keys() == table.keys(), f"other kernels than in the table: {WRITE}"
    worse = {name: found for name in table if (found := lines[name].worse_than(table[name]))}
    assert worse == {}, f"optimize, or accept the numbers: {WRITE}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_table_has_no_spills(architecture: str) -> None:
    assert [line.kernel for line in machine_code.read(architecture) if line.spilled] == []


@pytest.mark.parametrize(
    ("changed", "described"),
    [
        ({"iteration": 11}, "5.50 instructions a step, was 5.00"),
        ({"instructions": 21}, "21 instructions, was 20"),
        ({"branches": 2}, "2 branches, was 1"),
        ({"wide": 3}, "3 wide, was 4"),
        ({"narrow": 1}, "1 narrow, was 0"),
        ({"spilled": 8}, "8 spilled, was 0"),
        ({"registers": 65}, "65 registers, was 64"),
        ({"static": 2048}, "2048 static, was 1024"),
        ({"dynamic": 16}, "16 dynamic, was 0"),
        ({"blocks": 1}, "1 blocks, was 2"),
    ],
)
def test_worse_number_is_described(changed: dict[str, int], described: str) -> None:
    known = Line(
        "aft_simple sum_kernel<float, 4>",
        instructions=20, iteration=10, steps=2, branches=1, wide=4, narrow=0, spilled=0,
        registers=64, static=1024, dynamic=0, claimed=2, blocks=2,
    )  # fmt: skip
    assert known.worse_than(known) == []
    assert known._replace(**changed).worse_than(known) == [described]
    assert Line.parse("\t".join(map(str, known))) == known
