"""Times every contender on every mechanism, in turn, and prints medians and ratios."""

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import limits as machine
from benchmarks.memory import peak_mib
from benchmarks.workloads import OP_TYPES, Run, Workload, contenders

SDPA_MAX_TOKENS = 16_384
FULL_MAX_TOKENS = 4_096
Row = dict[str, Any]


def main() -> None:
    """Runs the benchmark; writes ``build/bench.json``."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the documents")
    parser.add_argument("--mechanism", nargs="+", choices=list(OP_TYPES), default=list(OP_TYPES))
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lengths = options.tokens or ([4_096, 16_384] if options.quick else [4_096, 16_384, 65_536])
    rounds = 5 if options.quick else 11

    console = Console(width=180)
    workloads = [
        Workload(mechanism, 1, tokens, options.dim)
        for mechanism in options.mechanism
        for tokens in lengths
        if mechanism != "aft_full" or tokens <= FULL_MAX_TOKENS
    ]
    rows: list[Row] = []
    for workload in track(workloads, "Timing", console=console):
        rows += measure(workload, options.threads, rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"cpu": cpu_name(), "threads": options.threads, "rounds": rounds, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    console.print(table(rows))
    console.print(f"{cpu_name()}, {options.threads} threads; rows in {options.out}")


def measure(workload: Workload, threads: int, rounds: int) -> list[Row]:
    """Interleaves the contenders, so that a slow moment of the machine hits all alike."""
    runs = contenders(workload, threads)
    if workload.tokens > SDPA_MAX_TOKENS:
        del runs["sdpa"]
    for run in runs.values():
        run()
    rates = machine.measure()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(_time(run))
    limit_seconds, limit_kind = rates.seconds(**workload.work())
    return [
        {
            "mechanism": workload.mechanism,
            "batch": workload.batch,
            "tokens": workload.tokens,
            "dim": workload.dim,
            "contender": name,
            "seconds": median(seconds[name]),
            "limit_seconds": limit_seconds,
            "limit_kind": limit_kind,
            "peak_mib": peak_mib(run),
        }
        for name, run in runs.items()
    ]


def _time(run: Run) -> float:
    # The threads of the contender before spin for a while, on cores this one needs.
    time.sleep(0.03)
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def table(rows: Sequence[Row]) -> Table:
    """Milliseconds of each contender, and the ratios of ours to the best other and the limit."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    columns = ["mechanism", "tokens", *(f"{n} ms" for n in names), "best other / ours",
               "portable / ours", "ours / limit", "limit", "peak MiB"]  # fmt: skip
    shown = Table(*columns)
    for column in shown.columns[1:]:
        column.justify = "right"
    for key in dict.fromkeys((row["mechanism"], row["tokens"]) for row in rows):
        group = {r["contender"]: r for r in rows if (r["mechanism"], r["tokens"]) == key}
        times = {name: row["seconds"] for name, row in group.items()}
        ours = group.get("aftexport")
        cells = [f"{times[n] * 1e3:.2f}" if n in times else "" for n in names]
        ratios = ["", "", ""]
        if ours is not None:
            others = [t for n, t in times.items() if n not in ("aftexport", "sdpa")]
            ratios = [
                f"{min(others) / ours['seconds']:.1f}",
                f"{times['ort_portable'] / ours['seconds']:.1f}",
                f"{ours['seconds'] / ours['limit_seconds']:.2f}",
            ]
        peak = f"{ours['peak_mib']:.0f}" if ours is not None else ""
        kind = next(iter(group.values()))["limit_kind"]
        shown.add_row(key[0], f"{key[1]:,}", *cells, *ratios, kind, peak)
    return shown


def cpu_name() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
