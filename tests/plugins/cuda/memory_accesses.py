"""Bank conflicts and uncoalesced accesses of the CUDA kernels, counted on the emulated GPU.

``python -m plugins.cuda.memory_accesses`` writes the bounds of memory_accesses.tsv again; new
kernels get a reason by hand.
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from . import emulated

TABLE = Path(__file__).with_name("memory_accesses.tsv")
_KERNEL = re.compile(r"(\w+)(?:<[^(]*>)?\(")
_CASTS = re.compile(r"\((anonymous namespace|aft::Gate)\)")


class Ratios(NamedTuple):
    """What a kernel's accesses take, relative to the fewest for as many bytes."""

    passes: float  # over the banks of shared memory
    sectors: float  # of global memory


class Bound(NamedTuple):
    """A row of the table: the largest ratios, and why they are above 1."""

    ratios: Ratios
    reason: str


def read_table() -> dict[tuple[str, str], Bound]:
    """Return the bounds by stem and kernel."""
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    return {
        (stem, kernel): Bound(Ratios(float(passes), float(sectors)), reason)
        for stem, kernel, passes, sectors, reason in rows
    }


def count(program: Path) -> dict[str, Ratios]:
    """Return the ratios of each kernel that a program of the build runs, over all its launches."""
    done = subprocess.run([program, "accesses"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    names = _kernels_by_place(program)
    sums: dict[str, list[int]] = defaultdict(lambda: [0] * 4)
    for line in done.stdout.splitlines():
        place, *counts = line.split()
        total = sums[names[int(place, 16)]]
        total[:] = [a + int(b) for a, b in zip(total, counts, strict=True)]
    return {
        kernel: Ratios(passes / max(fewest, 1), sectors / max(fewest_sectors, 1))
        for kernel, (passes, fewest, sectors, fewest_sectors) in sums.items()
    }


def exceeding(stem: str, program: Path) -> list[str]:
    """Return the kernels beyond their bounds, or without any."""
    table = read_table()
    found = []
    for kernel, ratios in count(program).items():
        bound = table.get((stem, kernel))
        limits = bound.ratios if bound else Ratios(0.0, 0.0)
        # The table's numbers are rounded.
        if any(ratio > limit + 0.006 for ratio, limit in zip(ratios, limits, strict=True)):
            found.append(f"{stem} {kernel}: {ratios}, at most {limits}")
    return found


def _kernels_by_place(program: Path) -> dict[int, str]:
    listed = subprocess.run(["nm", "-C", program], capture_output=True, text=True, check=True)
    names = {}
    for line in listed.stdout.splitlines():
        place, _, name = line.partition(" ")
        if place and (found := _KERNEL.search(_CASTS.sub("", name))):
            names[int(place, 16)] = found[1]
    return names


def main() -> None:
    """Write the table again."""
    old = read_table() if TABLE.exists() else {}
    rows = ["stem\tkernel\tpasses\tsectors\treason"]
    for stem in emulated.STEMS:
        for kernel, (passes, sectors) in sorted(
            count(emulated.build() / f"{stem}_accesses").items()
        ):
            reason = old[stem, kernel].reason if (stem, kernel) in old else ""
            rows.append(f"{stem}\t{kernel}\t{passes:.2f}\t{sectors:.2f}\t{reason}")
    TABLE.write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
