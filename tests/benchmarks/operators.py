"""The core operators: every contender on every mechanism, in turn; medians and ratios."""

import argparse
import multiprocessing
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aftexport.bench.timing import Run, peak_mib
from benchmarks.contenders import MISSING
from benchmarks.contenders import OPERATORS as CONTENDERS
from benchmarks.contenders.contender import CannotReadError
from benchmarks.limits import interleave, least_seconds, rates
from benchmarks.processor import read_processor
from benchmarks.record import Refusals, Row, start
from benchmarks.setup import COMPILED
from benchmarks.table_parts import Facts, best_peer, grouped
from benchmarks.workloads import OP_TYPES, Workload, check_agreement

LENGTHS = (4_096, 16_384, 65_536, 262_144)
QUICK_LENGTHS = (4_096, 16_384)
OTHERS_MAX_TOKENS = 65_536
FULL_MAX_TOKENS = 4_096
SETTLING_CALLS, SETTLED_CALLS, FEW_FAULTS = 8, 2, 256
SDPA_MAX_TOKENS = {False: 16_384, True: 4_096}  # by --quick: two seconds a call at 16,384


def run(options: argparse.Namespace, console: Console) -> None:
    """Time the workloads that ``options`` name; write a record."""
    rounds = options.rounds or (3 if options.quick else 11)
    lengths = options.tokens or (QUICK_LENGTHS if options.quick else LENGTHS)
    mechanisms = options.mechanism or list(OP_TYPES)
    chosen, left_out = choose(mechanisms, lengths, options.contender, options.quick)
    refusals = Refusals(left_out=left_out + [f"{name}: {why}" for name, why in MISSING.items()])
    workloads = {
        Workload(mechanism, 1, tokens, options.dim): names
        for (mechanism, tokens), names in chosen.items()
    }
    facts = {name: CONTENDERS[name].facts for name in options.contender or CONTENDERS}
    out = start("operators", options, facts, rounds)
    if not COMPILED.exists():
        compiled = [w for w, n in workloads.items() if "torch_compile" in n]
        compile_all(compiled, console)
    rows: list[Row] = []
    for workload, names in track(workloads.items(), "Timing", console=console):
        rows += measure(workload, names, options.threads, rounds, refusals)
    out.write(rows, refusals)
    console.print(table(rows, facts))
    console.print(f"{read_processor().title}, {options.threads} threads; rows in {out.path}")
    refusals.show(console)


def choose(
    mechanisms: Sequence[str], lengths: Sequence[int], wanted: Sequence[str] | None, quick: bool
) -> tuple[dict[tuple[str, int], list[str]], list[str]]:
    """The contenders of every mechanism and length, and what is left out and why."""
    sdpa_most = SDPA_MAX_TOKENS[quick]
    chosen: dict[tuple[str, int], list[str]] = {}
    with_sdpa: set[int] = set()  # it is the same for every mechanism, and slow
    for mechanism in mechanisms:
        for tokens in lengths:
            names = [
                name
                for name in wanted or CONTENDERS
                if (mechanism != "aft_full" or tokens <= FULL_MAX_TOKENS)
                and (name != "sdpa" or (tokens <= sdpa_most and tokens not in with_sdpa))
                and (CONTENDERS[name].is_ours or tokens <= OTHERS_MAX_TOKENS)
            ]
            if names:
                chosen[mechanism, tokens] = names
            if "sdpa" in names:
                with_sdpa.add(tokens)
    longest = max(lengths)
    reasons = {
        f"aft_full above {FULL_MAX_TOKENS:,} tokens: its bias is quadratic in the tokens":
            "aft_full" in mechanisms and longest > FULL_MAX_TOKENS,
        f"sdpa above {sdpa_most:,} tokens: its time is quadratic in the tokens":
            longest > sdpa_most,
        "sdpa after the first mechanism of a length: it is the same for all": len(mechanisms) > 1,
        f"all but aftexport above {OTHERS_MAX_TOKENS:,} tokens": longest > OTHERS_MAX_TOKENS,
    }  # fmt: skip
    return chosen, [reason for reason, holds in reasons.items() if holds]


def compile_all(workloads: Sequence[Workload], console: Console) -> None:
    """Fills torch.compile's cache, in as many processes as there are cores."""
    # Forked from here, where no thread runs yet, they need not import the compiler again.
    import torch._inductor.compile_fx  # noqa: F401

    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as pool:
        done = pool.map(compile_one, workloads)
        for _ in track(done, "Compiling", len(workloads), console=console):
            pass


def compile_one(workload: Workload) -> None:
    """Compiles one workload, in a process of its own."""
    torch.compiler.reset()
    CONTENDERS["torch_compile"].prepare_operator(workload, workload.inputs(), threads=1)()


def measure(
    workload: Workload, names: Sequence[str], threads: int, rounds: int, refusals: Refusals
) -> list[Row]:
    """Return the workload's rows, one for each contender that reads the operator."""
    torch.compiler.reset()  # past eight shapes of one function it would stop compiling
    runs: dict[str, Run] = {}
    tensors = workload.inputs()
    for name in names:
        try:
            runs[name] = CONTENDERS[name].prepare_operator(workload, tensors, threads)
        except CannotReadError as error:
            refusals.add(workload.mechanism, workload.tokens, name, f"cannot read: {error}")
    outputs = {name: np.asarray(run()[0]) for name, run in runs.items()}  # type: ignore[index]
    same = {name: x for name, x in outputs.items() if CONTENDERS[name].is_same_function}
    check_agreement(workload, same)
    del outputs, same
    for run in runs.values() if workload.tokens > QUICK_LENGTHS[-1] else ():
        settle(run)
    work = workload.work()
    limits = rates(work["bytes_moved"], threads)
    timed = dict(runs) | {name: rate.run for name, rate in limits.items()}
    for rate in limits.values():
        rate.run()
    seconds = interleave(timed, rounds)
    limit_seconds, limit_kind = least_seconds(limits, seconds, **work)
    return [
        {
            "mechanism": workload.mechanism,
            "batch": workload.batch,
            "tokens": workload.tokens,
            "dim": workload.dim,
            "contender": name,
            "seconds": seconds[name],
            "limit_seconds": limit_seconds,
            "limit_kind": limit_kind,
            "peak_mib": peak_mib(run),
        }
        for name, run in runs.items()
    ]


def settle(run: Run) -> None:
    """Calls until a few calls in a row take no memory fresh from the kernel; see ``setup``."""
    quiet = 0
    for _ in range(SETTLING_CALLS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run()
        taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        quiet = quiet + 1 if taken < FEW_FAULTS else 0
        if quiet == SETTLED_CALLS:
            return


def table(rows: Sequence[Row], contenders: Facts) -> Table:
    """Return milliseconds of each contender, and the ratios of ours to the best peer and limit."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    columns = ["mechanism", "tokens", *(f"{contenders[n]['title']} ms" for n in names), "best peer",
               "best peer / ours", "ours / limit", "limit", "peak MiB"]  # fmt: skip
    shown = Table(*columns)
    for column in shown.columns[1:]:
        column.justify = "right"
    for (mechanism, tokens), group in grouped(rows).items():
        times = {name: row["seconds"] for name, row in group.items()}
        cells = [f"{times[n] * 1e3:.2f}" if n in times else "" for n in names]
        limit = next(iter(group.values()))
        ratios = ["", "", "", limit["limit_kind"], ""]
        if ours := next((r for n, r in group.items() if contenders[n]["is_ours"]), None):
            best = best_peer(group.values(), contenders)
            ratios = [
                contenders[best["contender"]]["title"] if best else "",
                f"{best['seconds'] / ours['seconds']:.1f}" if best else "",
                f"{ours['seconds'] / ours['limit_seconds']:.2f}",
                limit["limit_kind"],
                "" if ours["peak_mib"] is None else f"{ours['peak_mib']:.0f}",
            ]
        shown.add_row(mechanism, f"{tokens:,}", *cells, *ratios)
    return shown
