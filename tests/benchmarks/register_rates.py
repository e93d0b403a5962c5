"""The rates of multiply-adds from registers alone, and of copies, as the bound of a run."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.limits import Rate

SOURCE = Path(__file__).with_suffix(".cc")
LIBRARY = Path("build/register_rates.so")
KINDS = ("fp32", "bf16", "int16", "int8")
_ROUNDS = 4_000_000
_COPY_BYTES = 128 * 2**20


def register_rates(threads: int) -> dict[str, Rate]:
    """Return the calls to time along with contenders, by kind.

    A kind whose instruction the processor lacks is absent. The rate of AMX tiles is not measured.

    Args:
        threads: number of threads, each with the same work.
    """
    pool = ThreadPoolExecutor(threads)
    found = {}
    for kind in KINDS:
        function = getattr(compile_library(), kind)
        if per_round := function(1):

            def run(function: "ctypes._NamedFuncPointer" = function) -> None:
                # ctypes releases the interpreter, so the threads run side by side.
                list(pool.map(function, [_ROUNDS] * threads))

            found[kind] = Rate(kind, run, float(threads * _ROUNDS * per_round))
    memory = torch.ones(_COPY_BYTES // 4)
    source, target = memory.chunk(2)
    found["copy"] = Rate("copy", partial(target.copy_, source), float(_COPY_BYTES))
    return found


def in_billions(rates: Mapping[str, Rate], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return billions of multiply-adds a second, and for copies of bytes read plus written.

    Args:
        rates: the calls, by kind.
        seconds: the median time of a call, by kind.
    """
    return {kind: rate.work / seconds[kind] / 1e9 for kind, rate in rates.items()}


@cache
def compile_library() -> ctypes.CDLL:
    """Compile the loops for this processor.

    Raises:
        RuntimeError: if a compiler is missing.
    """
    if not (compiler := shutil.which("c++")):
        raise RuntimeError(
            "Expected a C++ compiler for the rates of registers, got none. Install g++."
        )
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    options = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, str(SOURCE), "-o", str(LIBRARY)], check=True)
    library = ctypes.CDLL(str(LIBRARY.absolute()))
    for kind in KINDS:
        function = getattr(library, kind)
        function.argtypes, function.restype = [ctypes.c_long], ctypes.c_long
    return library
