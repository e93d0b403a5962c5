"""The table of the kernels' machine code: a line for each kernel and architecture.

`python -m plugins.cuda.machine_code` writes it from build/cuda, see docs/kernels.md.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.control_flow import GLOBAL, SHARED, ControlFlow, Work
from benchmarks.gpu.disassembly import LIBRARY, Kernel, architectures_in, disassemble
from benchmarks.gpu.occupancy import claim, dynamic_shared, resident_blocks

ARCHITECTURES = ("80", "90", "100", "120")
FOLDER = Path(__file__).with_name("machine_code")
_ELEMENT_BYTES = {"float": 4, "Half": 2, "BFloat16": 2}
_BRANCHES = ("BRA", "BRX", "BSYNC", "CALL")


class Line(NamedTuple):
    """A kernel's line of the table.

    The hot loop is the outermost loop with most products of tensor cores, else with most accesses
    of 16 bytes, else with most instructions. The step is the unit of its work: a product of a
    tensor core, an element moved from or to global memory, or, without both, an iteration. A kernel
    without a loop counts as one iteration.

    Attributes:
        kernel: source file, function and template arguments.
        instructions: of the hot loop, on all its paths and in its inner loops.
        iteration: the instructions that a warp issues in a full iteration, inner loops taken once.
        steps: of a full iteration.
        branches: instructions of the hot loop that may jump.
        wide: accesses of 16 bytes a thread in the hot loop, to global or shared memory.
        narrow: shorter accesses to global memory.
        spilled: bytes of a thread's registers that were moved to memory.
        registers: number of registers of a thread.
        static, dynamic: bytes of a block's shared memory.
        claimed: blocks that a multiprocessor must hold by __launch_bounds__.
        blocks: those that it holds.
    """

    kernel: str
    instructions: int
    iteration: int
    steps: int
    branches: int
    wide: int
    narrow: int
    spilled: int
    registers: int
    static: int
    dynamic: int
    claimed: int
    blocks: int

    @classmethod
    def of(cls, kernel: Kernel) -> "Line":
        """Measure a kernel."""
        flow = ControlFlow(kernel)
        loop = flow.hot
        code = kernel.code if loop is None else flow.listing(loop)
        work = flow.whole() if loop is None else flow.work_of(loop)
        accesses = [i for i in code if i.name in GLOBAL]
        return cls(
            kernel=f"{kernel.stem} {kernel.name}",
            instructions=len(code),
            iteration=int(work.instructions),
            steps=_steps(kernel, work),
            branches=sum(i.name in _BRANCHES for i in code),
            wide=sum(i.name in GLOBAL + SHARED and i.bytes == 16 for i in code),
            narrow=sum(i.bytes < 16 for i in accesses),
            spilled=kernel.spilled,
            registers=kernel.registers,
            static=kernel.shared,
            dynamic=dynamic_shared(kernel),
            claimed=claim(kernel.stem, kernel.function)[1],
            blocks=resident_blocks(kernel),
        )

    @classmethod
    def parse(cls, text: str) -> "Line":
        """Read a line of the table."""
        kernel, *numbers = text.split("\t")
        return cls(kernel, *map(int, numbers))

    def worse_than(self, known: "Line") -> list[str]:
        """Describe the numbers that are worse than the table's."""
        mine, theirs = self.iteration / self.steps, known.iteration / known.steps
        found = [f"{mine:.2f} instructions a step, was {theirs:.2f}"] if mine > theirs else []
        names = ("instructions", "branches", "narrow", "spilled", "registers", "static", "dynamic")
        values = [(name, getattr(self, name), getattr(known, name)) for name in names]
        found += [f"{value} {name}, was {was}" for name, value, was in values if value > was]
        values = [(name, getattr(self, name), getattr(known, name)) for name in ("wide", "blocks")]
        found += [f"{value} {name}, was {was}" for name, value, was in values if value < was]
        return found


def measure(library: Path, architecture: str) -> list[Line]:
    """Return the lines of all kernels of a library, sorted by their names."""
    return sorted(Line.of(kernel) for kernel in disassemble(library, architecture))


def table_of(architecture: str) -> Path:
    """Return the file of an architecture's lines."""
    return FOLDER / f"sm_{architecture}.tsv"


def read(architecture: str) -> list[Line]:
    """Return the committed lines of an architecture."""
    _, *lines = table_of(architecture).read_text().splitlines()
    return [Line.parse(line) for line in lines]


def write(architecture: str, lines: Iterable[Line]) -> None:
    """Write the lines of an architecture."""
    FOLDER.mkdir(exist_ok=True)
    rows = [Line._fields, *lines]
    table_of(architecture).write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


def _steps(kernel: Kernel, work: Work) -> int:
    """Return the products of tensor cores on a path, else the elements moved, else 1."""
    return int(work.tensor or work.moved // _ELEMENT_BYTES[kernel.element] or 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the table of the kernels' machine code.")
    parser.add_argument("--library", type=Path, default=LIBRARY, help="default: %(default)s")
    options = parser.parse_args()
    if lacking := set(ARCHITECTURES) - architectures_in(options.library):
        print(
            f"Expected code for {', '.join(sorted(lacking))} in {options.library}, found none: "
            "run `make cuda`.",
            file=sys.stderr,
        )
        return 1
    for architecture in ARCHITECTURES:
        write(architecture, measure(options.library, architecture))
        print(table_of(architecture))
    return 0


if __name__ == "__main__":
    sys.exit(main())
