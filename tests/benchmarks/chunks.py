"""Documents in chunks: against the whole document where both fit, and a million tokens."""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aftexport.bench.timing import peak_mib
from aftexport.chunked.archive import write_chunked
from aftexport.chunked.runner import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.lowering.finish import finish
from benchmarks.contenders.contender import Contender
from benchmarks.limits import interleave
from benchmarks.processor import read_processor
from benchmarks.record import Refusals, Row, start
from benchmarks.task import build
from benchmarks.workloads import OP_TYPES, Workload

CONTENDERS: dict[str, Contender] = {}  # a model whole and in chunks, always
BOTH_TOKENS, LONG_TOKENS = 65_536, 1_000_000


def run(options: argparse.Namespace, console: Console) -> None:
    """Measures the mechanisms that ``options`` name; writes ``build/bench_chunks.json``."""
    rounds = options.rounds or 3
    out = start("chunks", options, {}, rounds)
    both, long = options.tokens or (BOTH_TOKENS, LONG_TOKENS)
    mechanisms = [m for m in options.mechanism or OP_TYPES if m != "aft_full"]
    rows = [
        measure(mechanism, both, long, options.dim, options.threads, rounds)
        for mechanism in track(mechanisms, "Documents in chunks", console=console)
    ]
    out.write(rows, Refusals())
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    console.print(f"{read_processor().title}, {options.threads} threads; rows in {out.path}")


def measure(mechanism: str, both: int, long: int, dim: int, threads: int, rounds: int) -> Row:
    """Return the row of a model of four layers.

    A document of ``both`` tokens runs whole as well, one of ``long`` tokens only in chunks.
    """
    task = build(Workload(mechanism, 1, both, dim))
    lowered = task.model.lowered
    ids = np.random.default_rng(0).integers(0, 8_192, long)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "chunked.zip"
        plan = write_chunked(archive, lowered, precision="fp32")
        chunked = ChunkedModel(archive, plan, threads=threads)
        parts, long_mib = _watched(chunked, ids)
        whole = OnnxRuntimeEngine(finish(lowered).SerializeToString(), threads=threads)
        expected = whole.run(task.arrays)["logits"]
        part = task.arrays["input_ids"][0]
        error = np.abs(chunked.run(part)["logits"] - expected).max() / max(
            1.0, np.abs(expected).max()
        )
        runs = {"whole": lambda: whole.run(task.arrays), "chunks": lambda: chunked.run(part)}
        times = interleave(runs, rounds)
    return {
        "mechanism": mechanism,
        "tokens": both,
        "whole_seconds": times["whole"],
        "chunks_seconds": times["chunks"],
        "error": float(error),
        "long_tokens": long,
        "long_seconds": sum(parts),
        "long_mib": long_mib,
        "longest_part_seconds": max(parts),
    }


def _watched(model: ChunkedModel, ids: NDArray[np.int64]) -> tuple[list[float], float | None]:
    """Seconds of each part, and how far memory rose."""
    seconds: list[float] = []

    def run() -> None:
        last = time.perf_counter()
        for _ in model.parts(ids):
            seconds.append(time.perf_counter() - last)
            last = time.perf_counter()

    return seconds, peak_mib(run)
