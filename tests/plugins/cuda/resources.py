"""Registers, spills and shared memory of the CUDA kernels, by the reports of ptxas in build/cuda.

``python -m plugins.cuda.resources`` writes resources.tsv. A row has the maxima of a kernel over its
template arguments, or of one width if the shared memory depends on that.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import built, emulated

TABLE = Path(__file__).with_name("resources.tsv")
ARCHITECTURES = ("80", "90", "100", "120")
REGISTERS = 64 * 1024
"""Registers of a multiprocessor, which warps get in units of 8 a thread."""
SHARED = {"80": 164, "86": 100, "89": 100, "90": 228, "100": 228, "120": 100}
"""Shared memory of a multiprocessor in KiB, of which each block takes one more than it uses."""
_REPORT = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for 'sm_(?P<architecture>\d+)a?'\n"
    r".*\n"
    r".* (?P<spilled>\d+) bytes spill stores.*\n"
    r".*Used (?P<registers>\d+) registers(?:.* (?P<shared>\d+) bytes smem)?"
)
_BOUNDS = re.compile(r"__launch_bounds__\((\w+), (\d+)\)\s*(\w+)\(")


class Kernel(NamedTuple):
    """A form of a kernel as compiled for one architecture."""

    name: str  # with its template arguments, as in ``sum_kernel<Half, 8>``
    architecture: str  # the compute capability without its dot
    spilled: int  # bytes of a thread's registers in local memory
    registers: int  # of a thread
    static: int  # bytes of a block's shared memory
    dynamic: int  # the same, as the launch sets it

    @property
    def function(self) -> str:
        """The name without template arguments."""
        return self.name.partition("<")[0]

    @property
    def row(self) -> str:
        """The name in the table."""
        return f"{self.function} {_width(self.name)}" if self.dynamic else self.function


class Row(NamedTuple):
    """A row of the table: a kernel, and the maxima of its forms."""

    kernel: str  # source file, function and, if the shared memory depends on it, width
    forms: int  # number of combinations of template arguments
    spilled: int
    shared: int
    registers: tuple[int, ...]  # for each of ``ARCHITECTURES``

    def worse_than(self, known: "Row") -> list[str]:
        """Describe the numbers that are worse than the table's."""
        pairs = [
            (name, getattr(self, name), getattr(known, name)) for name in ("spilled", "shared")
        ]
        pairs += [
            (f"registers on sm_{architecture}", mine, theirs)
            for architecture, mine, theirs in zip(
                ARCHITECTURES, self.registers, known.registers, strict=True
            )
        ]
        return [
            f"{self.kernel}: {mine} {name}, was {was}" for name, mine, was in pairs if mine > was
        ]


def kernels_of(stem: str) -> list[Kernel]:
    """Return the forms of a source file's kernels on every architecture of build/cuda."""
    folder = built.FOLDER / "CMakeFiles" / "aft_cuda.dir"
    found = list(_REPORT.finditer(next(folder.rglob(f"{stem}.cu.o.report")).read_text()))
    return [
        Kernel(
            name,
            match["architecture"],
            int(match["spilled"]),
            int(match["registers"]),
            int(match["shared"] or 0),
            0
            if match["shared"]
            else _dynamic_sizes().get((name.partition("<")[0], _width(name)), 0),
        )
        for name, match in zip(_readable_names(m["name"] for m in found), found, strict=True)
    ]


def rows_of(stem: str) -> list[Row]:
    """Return the rows of a source file; an architecture that was not built has 0 registers."""
    kernels = kernels_of(stem)
    rows = []
    for name in sorted({kernel.row for kernel in kernels}):
        forms = [kernel for kernel in kernels if kernel.row == name]
        rows.append(
            Row(
                f"{stem} {name}",
                len({kernel.name for kernel in forms}),
                max(kernel.spilled for kernel in forms),
                max(kernel.static + kernel.dynamic for kernel in forms),
                tuple(
                    max((k.registers for k in forms if k.architecture == architecture), default=0)
                    for architecture in ARCHITECTURES
                ),
            )
        )
    return rows


def read_table() -> list[Row]:
    """Return the committed rows."""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return [
        Row(kernel, *map(int, numbers[:3]), tuple(map(int, numbers[3:])))
        for kernel, *numbers in rows
    ]


def claims_of(stem: str) -> dict[str, tuple[int, int]]:
    """Return threads and claimed blocks per multiprocessor by ``__launch_bounds__``, by kernel."""
    source = next(emulated.KERNELS.rglob(f"{stem}.cu")).read_text()
    headers = re.findall(r'#include "([\w/]+\.cuh)"', source)
    source += "".join((emulated.KERNELS / header).read_text() for header in headers)
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", source))
    claims = {
        name: (int(constants.get(threads, threads)), int(blocks))
        for threads, blocks, name in _BOUNDS.findall(source)
    }
    assert len(claims) == source.count("__global__"), "a kernel has no __launch_bounds__"
    return claims


def _readable_names(mangled: Iterable[str]) -> list[str]:
    """Return names of kernels with their template arguments, without namespaces."""
    done = subprocess.run(["c++filt", *mangled], capture_output=True, text=True, check=True)
    printed = done.stdout
    for words in ("aft::cuda::", "(anonymous namespace)::", "(aft::Gate)"):
        printed = printed.replace(words, "")
    return [line.removeprefix("void ").partition("(")[0] for line in printed.splitlines()]


def _width(name: str) -> int:
    """Return the first number among the template arguments, or 0."""
    width = re.search(r", (\d+)", name)
    return int(width[1]) if width else 0


@cache
def _dynamic_sizes() -> dict[tuple[str, int], int]:
    """Return the sizes of the structs in dynamic shared memory, by function and width."""
    source = Path(__file__).with_name("shared_sizes.cc")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "shared_sizes"
        compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-w", "-fno-strict-aliasing"]
        includes = [f"-I{folder}" for folder in (*emulated.INCLUDES, source.parent / "emulator")]
        subprocess.run([*compiler, *includes, source, "-o", program], check=True)
        printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in printed.splitlines()]
    return {(function, int(width)): int(size) for function, width, size in words}


def main() -> int:
    """Write the table again."""
    rows = [row for stem in emulated.STEMS for row in rows_of(stem)]
    if not all(all(row.registers) for row in rows):
        print(f"Expected code for sm_{', sm_'.join(ARCHITECTURES)} in {built.FOLDER}, found less: "
              "run `make cuda`.", file=sys.stderr)  # fmt: skip
        return 1
    header = ["kernel", "forms", "spilled", "shared", *(f"sm_{a}" for a in ARCHITECTURES)]
    lines = [header, *([*row[:-1], *row.registers] for row in rows)]
    TABLE.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
    print(TABLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
