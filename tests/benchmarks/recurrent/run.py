"""The times and the memory of every update rule, beside the bounds of the machine."""

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from aftexport.bench.timing import Run, peak_mib
from benchmarks.contenders.contender import last_line
from benchmarks.limits import Rate, copies, interleave, register_rate
from benchmarks.processor import read_processor
from benchmarks.record import Refusals, Row, start
from benchmarks.recurrent.contenders import (
    CONTENDERS,
    OURS,
    RULES,
    Preparation,
    Recurrence,
    preparation,
    session,
)
from benchmarks.recurrent.tables import record_parts, with_best_rates
from benchmarks.workloads import check_agreement

SHAPES = ((1, 16_384, 8, 32), (1, 16_384, 1, 256), (32, 512, 8, 32))
"""Documents, tokens, heads and channels of a head."""
MEMORY_TOKENS = (16_384, 65_536)
MEMORY_CONTENDERS = (OURS, "onnxruntime")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
Outputs = dict[str, NDArray[np.float32]]


def run(options: argparse.Namespace, console: Console) -> None:
    """Time every rule at every size with the threads of ``options`` and with one; write a record.

    With several threads, times are those of the wall; with one, those of the processor.
    """
    rounds = options.rounds or 11
    shapes = [s for s in SHAPES if s[1] in (options.tokens or (s[1],))]
    names = options.contender or list(CONTENDERS)
    facts = {name: {"title": CONTENDERS[name]} for name in names}
    out = start("recurrent", options, facts, rounds)
    # First, because it forks.
    watched = [n for n in names if n in MEMORY_CONTENDERS]
    documents = [Recurrence(rule, 1, n, *SHAPES[0][2:]) for rule in RULES for n in MEMORY_TOKENS]
    memory = measure_memory(watched, documents, options.threads)
    workloads = [Recurrence(rule, *shape) for shape in shapes for rule in RULES]
    rows: list[Row] = []
    refusals = Refusals()
    for workload in track(workloads, "Recurrent", console=console):
        rows += measure(workload, names, [options.threads, 1], rounds, refusals)
    rows = with_best_rates(rows)
    earlier = (out.earlier or {"memory": []})["memory"]
    kept = [row for row in earlier if row["contender"] not in watched]
    record = out.write(rows, refusals, memory=kept + memory)
    for part in record_parts(record):
        console.print(part, "", sep="\n", markup=False, soft_wrap=True)
    refusals.show(console)
    console.print(f"{read_processor().title}; rows in {out.path}")


def measure(
    workload: Recurrence, names: list[str], counts: list[int], rounds: int, refusals: Refusals
) -> list[Row]:
    """Return a row of each contender for each number of threads in ``counts``.

    Raises:
        ArithmeticError: if two contenders compute different numbers.
    """
    torch.compiler.reset()
    feeds = workload.feeds()
    ways = {name: preparation(name, workload, feeds) for name in names}
    rows: list[Row] = []
    for threads in dict.fromkeys(counts):
        torch.set_num_threads(threads)
        runs, outputs = _first_runs(workload, ways, threads, refusals)
        ways = {name: ways[name] for name in runs}
        if not runs:
            break  # the caller reports the refusals
        check_agreement(workload, outputs)
        rows += _timed_rows(workload, runs, threads, rounds)
    return rows


def _first_runs(
    workload: Recurrence, ways: Mapping[str, Preparation], threads: int, refusals: Refusals
) -> tuple[dict[str, Run], Outputs]:
    """Return the calls that work, and their outputs."""
    runs: dict[str, Run] = {}
    outputs: Outputs = {}
    for name, prepare in ways.items():
        try:
            run = prepare(threads)
            outputs[name] = np.asarray(run())
        # A contender of others may raise anything; its reason is reported with the run.
        except Exception as error:
            if name == OURS:
                raise
            reason = f"cannot run: {last_line(error)}"
            refusals.add(mechanism_of(workload), workload.tokens, name, reason)
        else:
            runs[name] = run
    return runs, outputs


def _timed_rows(
    workload: Recurrence, runs: Mapping[str, Run], threads: int, rounds: int
) -> list[Row]:
    """Time the contenders and the machine's limits in turn."""
    clock = "wall" if threads > 1 else "processor"
    limits = _limits(workload, threads)
    timed = dict(runs) | {name: rate.run for name, rate in limits.items()}
    seconds = interleave(timed, rounds, CLOCKS[clock])
    best = dict.fromkeys(("fp32", "copy"), 0.0)
    for name, rate in limits.items():
        best[rate.kind] = max(best[rate.kind], rate.work / seconds[name])
    shared = {
        "mechanism": mechanism_of(workload),
        "rule": workload.rule,
        "batch": workload.batch,
        "tokens": workload.tokens,
        "heads": workload.heads,
        "width": workload.width,
        "threads": threads,
        "clock": clock,
        "memory_seconds": workload.bytes_moved / best["copy"],
        "multiply_add_seconds": workload.multiply_adds / best["fp32"],
        "limits": {kind: rate / 1e9 for kind, rate in best.items()},
    }
    return [shared | {"contender": name, "seconds": seconds[name]} for name in runs]


def _limits(workload: Recurrence, threads: int) -> dict[str, Rate]:
    """Return copies of the workload's size, and multiply-adds from registers."""
    measured = [register_rate("fp32", threads), *copies(workload.bytes_moved)]
    return {f"{rate.kind} {number}": rate for number, rate in enumerate(measured)}


def mechanism_of(workload: Recurrence) -> str:
    """Return the name of the update rule in a record."""
    return f"recurrent_linear_attention {workload.rule}"


def measure_memory(
    names: Sequence[str], workloads: Sequence[Recurrence], threads: int
) -> list[Row]:
    """Measure the workloads with each session of ONNX Runtime, in processes of their own.

    The processes are forked: call it before this process has run anything in several threads.
    """
    rows = []
    for name in names:
        for workload in workloads:
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                found = pool.submit(beyond_mib, name, workload, threads).result()
            rows.append(
                {
                    "contender": name,
                    "rule": workload.rule,
                    "tokens": workload.tokens,
                    "beyond_mib": found,
                }
            )
    return rows


def beyond_mib(name: str, workload: Recurrence, threads: int) -> float | None:
    """Return the maximum increase of resident memory during the first call of a session, in MiB.

    The inputs and the output exist before, and the session keeps no freed memory. So the increase
    is all that a call needs besides them. Return None if the system does not count it.
    """
    feeds = workload.feeds()
    loaded, feeds = session(name, workload, feeds, threads, has_arena=False)
    binding = loaded.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in feeds.items()}
    for input_name, value in values.items():
        binding.bind_ortvalue_input(input_name, value)
    output = onnxruntime.OrtValue.ortvalue_from_numpy(np.full_like(feeds["value"], np.nan))
    binding.bind_ortvalue_output("output", output)
    found = peak_mib(lambda: loaded.run_with_iobinding(binding))
    if not np.isfinite(output.numpy()).all():
        raise ArithmeticError(f"{workload}: expected numbers in the output of {name}, got NaN")
    return found
