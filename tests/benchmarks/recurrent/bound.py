"""The least time of a row's work on its machine."""

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.record import Row


def bound_of(row: Mapping[str, Any]) -> tuple[float, str]:
    """Return the least seconds of a row's work, and the part of the machine that binds."""
    parts = {"memory": row["memory_seconds"], "multiply-adds": row["multiply_add_seconds"]}
    name = max(parts, key=parts.__getitem__)
    return parts[name], name


def with_best_rates(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with the best rates of all rows of as many threads.

    A rate that other work on the machine has slowed is below the machine's. All sizes move about
    as many bytes, so one rate of copies serves all.
    """
    rows = list(rows)
    best: dict[tuple[int, str], float] = {}
    for row in rows:
        for kind, rate in row["limits"].items():
            key = (row["threads"], kind)
            best[key] = max(best.get(key, 0.0), rate)
    return [
        _with_rates(row, {kind: best[row["threads"], kind] for kind in row["limits"]})
        for row in rows
    ]


def _with_rates(row: Row, rates: Mapping[str, float]) -> Row:
    slower = {kind: row["limits"][kind] / rates[kind] for kind in rates}
    return row | {
        "limits": dict(rates),
        "memory_seconds": row["memory_seconds"] * slower["copy"],
        "multiply_add_seconds": row["multiply_add_seconds"] * slower["fp32"],
    }
