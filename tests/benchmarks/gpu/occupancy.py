"""Blocks of a kernel that a multiprocessor holds, and those that the source claims."""

import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.gpu.control_flow import SHARED as SHARED_ACCESSES
from benchmarks.gpu.disassembly import Kernel

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "plugins" / "cuda"
REGISTERS = 64 * 1024
SHARED = {"80": 164, "86": 100, "89": 100, "90": 228, "100": 228, "120": 100}
"""Shared memory of a multiprocessor in KiB, of which each block takes one more than it uses."""
THREADS = {"80": 2048, "86": 1536, "89": 1536, "90": 2048, "100": 2048, "120": 1536}
"""Threads that a multiprocessor holds."""
BOUNDS = re.compile(r"__launch_bounds__\((\w+), (\d+)\)\s*(\w+)\(")


def source_of(stem: str) -> str:
    """Return the text of the kernels' file and of the headers that it includes."""
    source = next(KERNELS.rglob(f"{stem}.cu")).read_text()
    headers = re.findall(r'#include "([\w/]+\.cuh)"', source)
    return source + "".join((KERNELS / header).read_text() for header in headers)


def claims_of(source: str) -> dict[str, tuple[int, int]]:
    """Return threads and blocks per multiprocessor by kernel name."""
    constants = dict(re.findall(r"constexpr int (k\w+) = (\d+);", source))
    return {
        name: (int(constants.get(threads, threads)), int(blocks))
        for threads, blocks, name in BOUNDS.findall(source)
    }


@cache
def claim(stem: str, function: str) -> tuple[int, int]:
    """Return the threads of a kernel's block, and the claimed blocks per multiprocessor."""
    return claims_of(source_of(stem))[function]


def dynamic_shared(kernel: Kernel) -> int:
    """Return the bytes of shared memory that a kernel's launch asks for beside the static ones."""
    if kernel.shared or not any(i.name in SHARED_ACCESSES for i in kernel.code):
        return 0
    width = re.search(r", (\d+)", kernel.name)
    assert width, kernel.name
    return _dynamic_sizes()[kernel.function, int(width[1])]


def resident_blocks(kernel: Kernel) -> int:
    """Return how many blocks of a kernel a multiprocessor holds at once."""
    threads, _ = claim(kernel.stem, kernel.function)
    # Registers are given to warps in units of 8 a thread.
    by_registers = REGISTERS // (-(-kernel.registers // 8) * 8 * threads)
    shared = kernel.shared + dynamic_shared(kernel) + 1024
    by_shared = SHARED[kernel.architecture] * 1024 // shared
    return min(by_registers, by_shared, THREADS[kernel.architecture] // threads)


@cache
def _dynamic_sizes() -> dict[tuple[str, int], int]:
    """Return the sizes of the structs in dynamic shared memory, by function and width."""
    source = Path(__file__).with_name("shared_sizes.cc")
    emulator = ROOT / "tests" / "plugins" / "cuda" / "emulator"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "shared_sizes"
        compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-w", "-fno-strict-aliasing"]
        includes = [f"-I{KERNELS}", f"-I{emulator}"]
        subprocess.run([*compiler, *includes, source, "-o", program], check=True)
        printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in printed.splitlines()]
    return {(function, int(width)): int(size) for function, width, size in words}
