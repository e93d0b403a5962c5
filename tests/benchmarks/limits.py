"""The medians of contenders that take turns, and of what the machine can do at best."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import onnx
import torch

from aftexport.bench.timing import Run, sample
from benchmarks.processor import read_processor
from benchmarks.workloads import open_session, single_node

_GEMM_SHAPES = ((512, 512, 512), (4096, 256, 1024))
_EXP_ELEMENTS = (1 << 16, 1 << 18)
_EXP_CALLS = 16  # in a row: one takes less time than a thread to wake


class Rate(NamedTuple):
    """One way to measure what the machine can do: ``run`` does ``work`` of a kind."""

    kind: str
    run: Run
    work: float


def rates(bytes_moved: float, threads: int) -> dict[str, Rate]:
    """Return the rates to time along with the contenders of a workload, by a name of each.

    copy: bytes read plus bytes written, at the workload's own size: what fits into the last cache
    moves several times faster than what does not. ``addcmul`` reads three arrays and writes one, as
    the operators do.

    gemm: float32 operations, by PyTorch and ONNX Runtime in several shapes; which library
    wins depends on the processor.

    exp: float32 exponentials in cache, by PyTorch's ``exp`` and ``sigmoid``, which is often faster.
    """
    measured = [*copies(bytes_moved), *_products(threads), *_exponentials()]
    return {f"{rate.kind} {number}": rate for number, rate in enumerate(measured)}


def least_seconds(
    rates: Mapping[str, Rate],
    seconds: Mapping[str, float],
    *,
    bytes_moved: float,
    flops: float,
    exps: float,
) -> tuple[float, str]:
    """Return the least time for some work at the best rates, and the kind that bounds it."""
    best = dict.fromkeys(("copy", "gemm", "exp"), 0.0)
    for name, rate in rates.items():
        best[rate.kind] = max(best[rate.kind], rate.work / seconds[name])
    work = {"copy": bytes_moved, "gemm": flops, "exp": exps}
    needed = {kind: work[kind] / best[kind] for kind in best}
    kind = max(needed, key=needed.__getitem__)
    return needed[kind], kind


def copies(bytes_moved: float) -> Iterator[Rate]:
    """Yield the ways to move as many bytes as a workload."""
    memory = torch.ones(int(bytes_moved) // 4)
    source, target = memory.chunk(2)
    yield Rate("copy", partial(target.copy_, source), bytes_moved)
    a, b, c, out = memory.chunk(4)
    yield Rate("copy", partial(torch.addcmul, a, b, c, out=out), bytes_moved)


@cache
def _products(threads: int) -> list[Rate]:
    measured = []
    for rows, inner, columns in _GEMM_SHAPES:
        left, right = torch.rand(rows, inner), torch.rand(inner, columns)
        out, flops = torch.empty(rows, columns), 2.0 * rows * inner * columns
        measured.append(Rate("gemm", partial(torch.mm, left, right, out=out), flops))
        node = onnx.helper.make_node("MatMul", ["left", "right"], ["output"])
        feeds = {"left": left.numpy()}
        session = open_session(single_node(node, feeds, {"right": right.numpy()}), threads)
        run = partial(session.run, None, feeds)
        measured.append(Rate("gemm", run, flops))
    return measured


@cache
def _exponentials() -> list[Rate]:
    return [
        Rate("exp", _exponential(function, elements), _EXP_CALLS * elements)
        for elements, function in product(_EXP_ELEMENTS, (torch.exp, torch.sigmoid))
    ]


def _exponential(function: Callable[..., torch.Tensor], elements: int) -> Run:
    inputs, out = torch.randn(elements), torch.empty(elements)

    def run() -> None:
        for _ in range(_EXP_CALLS):
            function(inputs, out=out)

    return run


def interleave(
    runs: Mapping[str, Run], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each contender, which take turns; see ``sample``."""
    return {name: median(taken) for name, taken in sample(runs, rounds, clock=clock).items()}


SOURCE = Path(__file__).with_name("register_rates.cc")
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
    """Return the calls to time along with contenders, by kind; threads have the same work each.

    A kind whose instruction the processor lacks is absent. The rate of AMX tiles is not measured.
    """
    found = {kind: rate for kind in KINDS if (rate := _rate(kind, threads)) is not None}
    memory = torch.ones(_COPY_BYTES // 4)
    source, target = memory.chunk(2)
    found["copy"] = Rate("copy", partial(target.copy_, source), float(_COPY_BYTES))
    return found


def register_rate(kind: str, threads: int) -> Rate:
    """Return the call to time for one kind of product.

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
    """Return billions of multiply-adds a second, and for copies of bytes read plus written."""
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
