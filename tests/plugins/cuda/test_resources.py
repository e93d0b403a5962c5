"""Check the resources that ptxas reports for every kernel on every architecture of build/cuda.

A kernel's occupancy is claimed by its ``__launch_bounds__(threads, blocks)``: the compiler keeps
registers within it, by spilling if it must, and the static shared memory must fit as well.
"""

import pytest

from . import emulated, resources
from .resources import ARCHITECTURES, REGISTERS, SHARED, Row, kernels_of

WRITE = "`make cuda-table` with all architectures"


@pytest.mark.parametrize("stem", emulated.STEMS)
def test_kernels_keep_occupancy_without_spilling(architectures: set[str], stem: str) -> None:
    assert architectures <= SHARED.keys()
    kernels, claims = kernels_of(stem), resources.claims_of(stem)
    built = {(kernel.function, kernel.architecture) for kernel in kernels}
    assert built == {(name, each) for name in claims for each in architectures}
    for kernel in kernels:
        threads, blocks = claims[kernel.function]
        assert kernel.spilled == 0, kernel
        assert -(-kernel.registers // 8) * 8 * threads * blocks <= REGISTERS, kernel
        assert (kernel.static + 1024) * blocks <= SHARED[kernel.architecture] * 1024, kernel


@pytest.mark.parametrize("stem", emulated.STEMS)
def test_resources_are_no_worse(architectures: set[str], stem: str) -> None:
    table = {row.kernel: row for row in resources.read_table() if row.kernel.split()[0] == stem}
    rows = {row.kernel: row for row in resources.rows_of(stem)}
    assert {name: row.forms for name, row in rows.items()} == {
        name: row.forms for name, row in table.items()
    }, f"other kernels than in the table: {WRITE}"
    worse = [found for name, row in rows.items() for found in row.worse_than(table[name])]
    assert worse == [], f"optimize, or accept the numbers: {WRITE}"


def test_table_has_no_spills() -> None:
    assert [row.kernel for row in resources.read_table() if row.spilled] == []


@pytest.mark.parametrize(
    ("changed", "described"),
    [
        ({"spilled": 8}, "8 spilled, was 0"),
        ({"shared": 2048}, "2048 shared, was 1024"),
        ({"registers": (64, 65, 64, 64)}, f"65 registers on sm_{ARCHITECTURES[1]}, was 64"),
    ],
)
def test_worse_number_is_described(changed: dict[str, int], described: str) -> None:
    known = Row("aft_simple sum_kernel", 6, spilled=0, shared=1024, registers=(64,) * 4)
    assert known.worse_than(known) == []
    worse = known._replace(**changed)
    assert worse.worse_than(known) == [f"aft_simple sum_kernel: {described}"]
