"""The tables and the picture of the encoders, from the records."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pictures import IMAGES, contender_styles
from benchmarks.plot import Panel, draw
from benchmarks.record import read_records
from benchmarks.table_parts import (
    PRECISIONS,
    Record,
    Row,
    best_peer,
    grouped,
    label,
    limits_sentence,
    row_of,
    setting,
    versions,
)

PICTURE = IMAGES / "encoders.svg"
TITLES = {"modernbert": "ModernBERT-base", "bert": "BERT-base"}
"""The shapes, in the order of the tables."""
_VALUES = {"seconds": ("milliseconds", 1e3), "peak_mib": ("MiB beyond the weights", 1.0)}
"""The measured values that are shown: the name of their unit, and its factor."""


def encoder_tables() -> str:
    """Return, for every record, its ratios, times, memory and errors; the latest has a picture."""
    records = list(read_records("encoders").values())
    if not records:
        return "No record exists yet: `make bench-encoders` writes one."
    picture = f"![Milliseconds and memory of encoders against tokens](images/{PICTURE.name})"
    return "\n\n".join([picture, *(part for record in records for part in record_parts(record))])


def draw_latest() -> None:
    """Draw the latest record, if there is one."""
    for record in list(read_records("encoders").values())[:1]:
        draw_encoders(record, PICTURE)


def record_parts(record: Record) -> Iterator[str]:
    """Yield the parts of a page that show a record."""
    yield f"### Encoders on {record['processor']['title']}"
    yield f"Measured on {setting(record)}.{versions(record)} {limits_sentence(record)}"
    for shape in (
        shape for shape in TITLES if any(r["mechanism"] == shape for r in record["rows"])
    ):
        rows = [row for row in record["rows"] if row["mechanism"] == shape]
        yield f"{TITLES[shape]}, {rows[0]['layers']} layers:"
        yield "\n".join(_ratio_lines(record, shape))
        yield "\n".join(_time_lines(record, rows))
    titles = {name: facts["title"] for name, facts in record["contenders"].items()}
    if record["cannot"]:
        yield "\n".join(
            f"- {titles[row['contender']]}, {TITLES[row['mechanism']]}, {row['tokens']:,} tokens: "
            f"{row['reason']}."
            for row in record["cannot"]
        )


def _ratio_lines(record: Record, shape: str) -> Iterator[str]:
    """Yield a table: how many times as fast ours is as the best peer, by length."""
    groups = {tokens: rows for (name, tokens), rows in grouped(record["rows"]).items()
              if name == shape}  # fmt: skip
    yield row_of(["times as fast as the best peer", *(f"{n:,} tokens" for n in sorted(groups))])
    yield row_of(["---"] * (len(groups) + 1))
    for precision in PRECISIONS:
        cells = [_ratio(record, groups[tokens], precision) for tokens in sorted(groups)]
        yield row_of([precision, *cells])


def _ratio(record: Record, group: Mapping[str, Row], precision: str) -> str:
    ours = group.get(f"aftexport_{precision}")
    best = best_peer(group.values(), record["contenders"], precision)
    if ours is None or best is None:
        return "not measured"
    title = record["contenders"][best["contender"]]["title"]
    return f"{label(best['seconds'] / ours['seconds'])} ({title})"


def _time_lines(record: Record, rows: list[Row]) -> Iterator[str]:
    """Yield a table: milliseconds and MiB of every contender by length, and its largest error."""
    lengths = sorted({row["tokens"] for row in rows})
    yield row_of(["milliseconds (MiB)", *(f"{n:,} tokens" for n in lengths), "largest error"])
    yield row_of(["---"] * (len(lengths) + 2))
    for name, facts in record["contenders"].items():
        own = {row["tokens"]: row for row in rows if row["contender"] == name}
        if own:
            cells = [_cell(own[n]) if n in own else "" for n in lengths]
            error = max(row["error_float32"] for row in own.values())
            yield row_of([facts["title"], *cells, f"{error:.0e}"])


def _cell(row: Row) -> str:
    peak = "" if row["peak_mib"] is None else f" ({row['peak_mib']:,.0f})"
    return f"{row['seconds'] * 1e3:,.0f}{peak}"


def draw_encoders(record: Mapping[str, Any], path: Path) -> None:
    """Draw times and memory against tokens, in panels for each shape."""
    panels = []
    for shape, title in TITLES.items():
        for value, (unit, factor) in _VALUES.items():
            panel = Panel(f"{title}, {unit}")
            for row in sorted(record["rows"], key=lambda row: int(row["tokens"])):
                if row["mechanism"] == shape and row[value]:
                    name = record["contenders"][row["contender"]]["title"]
                    point = (row["tokens"], row[value] * factor)
                    panel.curves.setdefault(name, []).append(point)
            panels += [panel] if panel.curves else []
    title = (
        f"Encoders: {record['processor']['title']}, {record['threads']} threads, {record['date']}"
    )
    draw(title, panels, contender_styles(record), path, columns=3, has_common_y=False)
