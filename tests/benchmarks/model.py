"""A whole model: a four-layer document classifier, every way it can be run on a CPU."""

import argparse
import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.contenders import MISSING
from benchmarks.contenders import MODELS as CONTENDERS
from benchmarks.contenders.contender import (
    CannotReadError,
    ModelContender,
    Prepared,
    last_line,
)
from benchmarks.limits import Rate, in_billions, register_rates
from benchmarks.processor import read_processor
from benchmarks.record import Refusals, Row, start
from benchmarks.table_parts import best_peer, grouped
from benchmarks.tables import record_parts
from benchmarks.task import Task, build, logits
from benchmarks.turns import ContenderProcess, busy_neighbour, summary, take_turns
from benchmarks.workloads import OP_TYPES, SOFTMAX, Workload

LENGTHS = (32, 64, 128, 256, 512, 1_024, 4_096, 16_384)
FULL_MAX_TOKENS = 4_096
FLOAT64_MAX_TOKENS = 4_096
SOFTMAX_MAX_TOKENS = 4_096
"""The longest document of the softmax encoder. At 16,384 tokens a peer needs over 20 GB."""
SLOW_PEER = 2.0
"""A peer that takes so many times as long as the best one gets no document over 4,096 tokens."""
ALL_PEERS_MAX_TOKENS = 4_096
LEFT_OUT = "left out"
PEAK_MAX_TOKENS = 4_096
MECHANISMS = (*OP_TYPES, SOFTMAX)


@dataclass(frozen=True)
class Turns:
    """How contenders take turns."""

    threads: int
    rounds: int
    neighbour: bool
    """Whether they run again beside a busy neighbour."""
    longest: int
    """The maximum tokens of AFT-full's model."""


def run(options: argparse.Namespace, console: Console) -> None:
    """Time the models that ``options`` name; write a record."""
    lengths = sorted(options.tokens or LENGTHS)
    longest = min(lengths[-1], FULL_MAX_TOKENS)
    turns = Turns(options.threads, options.rounds or 7, options.neighbour, longest)
    chosen = [CONTENDERS[name] for name in options.contender or CONTENDERS]
    refusals = Refusals(left_out=[f"{name}: {reason}" for name, reason in MISSING.items()])
    facts = {contender.name: contender.facts for contender in chosen}
    out = start("models", options, facts, turns.rounds)
    limits = register_rates(options.threads)
    rows: list[Row] = []
    for mechanism in track(options.mechanism or MECHANISMS, "Timing models", console=console):
        console.print(mechanism)
        with ExitStack() as stack:
            enter = stack.enter_context
            processes = {c: enter(closing(ContenderProcess(options.threads))) for c in chosen}
            for tokens in lengths:
                workload = Workload(mechanism, 1, tokens, options.dim)
                contenders = allowed(workload, chosen, rows, refusals)
                if contenders:
                    ready = {c: processes[c] for c in contenders}
                    rows += measure(build(workload, longest), ready, turns, limits, refusals)
        # A run that is stopped keeps the mechanisms before, and another run adds the rest.
        record = out.write(rows, refusals)
    for part in record_parts(record):
        console.print(part, "", sep="\n", markup=False, soft_wrap=True)
    console.print(f"{read_processor().title}, {options.threads} threads; rows in {out.path}")
    refusals.show(console)


def allowed(
    workload: Workload,
    chosen: Sequence[ModelContender],
    rows: Sequence[Row],
    refusals: Refusals,
) -> list[ModelContender]:
    """Return the contenders of a workload; the reason for the others goes to ``refusals``.

    ``rows`` are those so far, with those of shorter documents.
    """
    if workload.mechanism == "aft_full" and workload.tokens > FULL_MAX_TOKENS:
        refusals.left_out.append(
            f"aft_full above {FULL_MAX_TOKENS:,} tokens: its bias is quadratic"
        )
        return []
    if workload.mechanism != SOFTMAX:
        return without_slow_peers(workload, chosen, rows, refusals)
    if workload.tokens > SOFTMAX_MAX_TOKENS:
        refusals.left_out.append(
            f"softmax above {SOFTMAX_MAX_TOKENS:,} tokens: its time is quadratic, and so is the "
            "memory of some peers"
        )
        return []
    return [contender for contender in chosen if not contender.is_ours]


def without_slow_peers(
    workload: Workload,
    chosen: Sequence[ModelContender],
    rows: Sequence[Row],
    refusals: Refusals,
) -> list[ModelContender]:
    """Return the contenders without the peers that were far behind at the length before."""
    groups = [g for (mechanism, _), g in grouped(rows).items() if mechanism == workload.mechanism]
    if workload.tokens <= ALL_PEERS_MAX_TOKENS or not groups:
        return list(chosen)
    before = groups[-1]
    facts = {contender.name: contender.facts for contender in chosen}
    kept = []
    for contender in chosen:
        if reason := earlier_reason(workload.mechanism, contender, refusals):
            refusals.add(workload.mechanism, workload.tokens, contender.name, reason)
            continue
        best = best_peer(before.values(), facts, contender.precision)
        row = before.get(contender.name)
        if contender.is_ours or not (row and best) or row["seconds"] <= SLOW_PEER * best["seconds"]:
            kept.append(contender)
        else:
            times = row["seconds"] / best["seconds"]
            reason = (
                f"{LEFT_OUT}: {times:.1f} times the best peer's time at {row['tokens']:,} tokens"
            )
            refusals.add(workload.mechanism, workload.tokens, contender.name, reason)
    return kept


def earlier_reason(mechanism: str, contender: ModelContender, refusals: Refusals) -> str:
    """Return the reason for which a contender was left out at a shorter length, or an empty one."""
    reasons = [
        row["reason"]
        for row in refusals.rows
        if (row["mechanism"], row["contender"]) == (mechanism, contender.name)
        and row["reason"].startswith(LEFT_OUT)
    ]
    return reasons[-1] if reasons else ""


def measure(
    task: Task,
    contenders: Mapping[ModelContender, ContenderProcess],
    turns: Turns,
    limits: Mapping[str, Rate],
    refusals: Refusals,
) -> list[Row]:
    """Return a row for each contender that can run the task; the others go to ``refusals``.

    ``limits`` are calls that measure the processor, timed in the same rounds.
    """
    expected = logits(task.model.module, task)
    exact = None
    if task.workload.tokens <= FLOAT64_MAX_TOKENS:
        exact = logits(copy.deepcopy(task.model.module).double(), task)
    ready: dict[str, ContenderProcess] = {}
    made: dict[str, Row] = {}
    for contender, process in contenders.items():
        row, reason = process.prepare(_prepare, contender, task.workload, turns)
        if row is None:
            refusals.add(task.workload.mechanism, task.workload.tokens, contender.name, reason)
        else:
            ready[contender.name], made[contender.name] = process, row
    runs = {kind: rate.run for kind, rate in limits.items()}
    times, seconds = take_turns(ready, runs, turns.rounds)
    beside: Mapping[str, list[float]] = {}
    if turns.neighbour:
        with busy_neighbour():
            beside, _ = take_turns(ready, {}, turns.rounds)
    return [
        {
            "mechanism": task.workload.mechanism,
            "batch": 1,
            "tokens": task.workload.tokens,
            "dim": task.workload.dim,
            "contender": name,
            **summary(times[name]),
            "beside_neighbour": summary(beside[name]) if beside else None,
            "error_float32": relative_error(row["output"], expected),
            "error_float64": None if exact is None else relative_error(row["output"], exact),
            "peak_mib": (
                ready[name].peak_mib() if task.workload.tokens <= PEAK_MAX_TOKENS else None
            ),
            "shares": row["shares"],
            "product_multiply_adds": task.product_multiply_adds,
            "limits": in_billions(limits, seconds),
        }
        for name, row in made.items()
    ]


def _prepare(
    contender: ModelContender, workload: Workload, turns: Turns
) -> tuple[Prepared | None, tuple[Row | None, str]]:
    """Return a contender that ran once, its output and the shares of its stages, or a reason."""
    torch.compiler.reset()
    task = build(workload, turns.longest)
    made, reason = try_contender(contender, task, turns.threads)
    if made is None:
        return None, (None, reason)
    prepared, output = made
    return prepared, ({"output": output, "shares": prepared.shares}, "")


def try_contender(
    contender: ModelContender, task: Task, threads: int
) -> tuple[tuple[Prepared, "np.ndarray[Any, Any]"] | None, str]:
    """Return a contender that ran once and its output, or None and the reason."""
    try:
        prepared = contender.prepare(task, threads)
        return (prepared, prepared.run()), ""
    except CannotReadError as error:
        return None, f"cannot read: {error}"
    # A contender of others may raise anything; its reason is reported with the run.
    except Exception as error:
        if contender.is_ours:
            raise
        return None, f"cannot run: {last_line(error)}"


def relative_error(output: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]") -> float:
    """Return the largest error, relative to the largest expected value."""
    scale = float(np.abs(expected).max())
    return float(np.abs(output.astype(np.float64) - expected).max()) / scale
