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
from benchmarks.processor import read_processor

SOURCE = Path(__file__).with_suffix(".cc")
LIBRARY = Path("build/register_rates.so")
_INSTRUCTIONS = {
    "fp32": "AVX2 and FMA",
    "bf16": "AVX512_BF16 or the BF16 instructions of Arm",
    "int16": "AVX2",
    "int8": "AVX512_VNNI or the I8MM instructions of Arm",
}
KINDS = tuple(_INSTRUCTIONS)
_ROUNDS = 4_000_000
_COPY_BYTES = 128 * 2**20


def register_rates(threads: int) -> dict[str, Rate]:
    """Return the calls to time along with contenders, by kind.

    A kind whose instruction the processor lacks is absent. The rate of AMX tiles is not measured.

    Args:
        threads: number of threads, each with the same work.
    """
    found = {kind: rate for kind in KINDS if (rate := _rate(kind, threads)) is not None}
    memory = torch.ones(_COPY_BYTES // 4)
    source, target = memory.chunk(2)
    found["copy"] = Rate("copy", partial(target.copy_, source), float(_COPY_BYTES))
    return found


def register_rate(kind: str, threads: int) -> Rate:
    """Return the call to time for one kind of product.

    Args:
        kind: one of ``KINDS``.
        threads: number of threads, each with the same work.

    Raises:
        RuntimeError: if the processor lacks the instruction.
    """
    rate = _rate(kind, threads)
    if rate is None:
        raise RuntimeError(
            f"Expected a processor with {_INSTRUCTIONS[kind]} for the rate of {kind} products, "
            f"got {read_processor().title}. Run the benchmark on another machine."
        )
    return rate


def _rate(kind: str, threads: int) -> Rate | None:
    """Return the call to time; None if the processor lacks the instruction."""
    function = getattr(compile_library(), kind)
    per_round = function(1)
    if not per_round:
        return None
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        # ctypes releases the interpreter, so the threads run side by side.
        list(pool.map(function, [_ROUNDS] * threads))

    return Rate(kind, run, float(threads * _ROUNDS * per_round))


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
