"""The tables of README and documentation, from the records.

As a program it also writes the pictures and, with all peers installed, their registry.

PYTHONPATH=tests:tests/support:examples .venv/bin/python -m benchmarks.tables
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from families.record import families_table

from benchmarks import aarch64, pictures
from benchmarks.documents.tables import document_sentence, document_tables, recipe_table
from benchmarks.encoder_tables import draw_latest, encoder_tables
from benchmarks.record import REGISTRY, read_records, read_registry, write_record
from benchmarks.recurrent.tables import recurrent_tables
from benchmarks.setup import prepare
from benchmarks.table_parts import (
    PRECISIONS,
    TITLES,
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
from benchmarks.workloads import SOFTMAX

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/benchmarks.md",
    "docs/how-to/train-on-whole-documents.md",
    "docs/kernels.md",
    "docs/models.md",
)
LARGE_ERROR = 0.1
"""The error of a peer, relative to the largest logit, above which a ratio names it."""
DETAILED_TOKENS = 1_024
"""The shortest documents with a table of every contender."""
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def speed_table() -> str:
    """Return the README's table: the record with the most measured, at its longest documents."""
    record = widest(read_records("models"))
    longest = dict(sorted(grouped(record["rows"])))
    missing = [
        facts["title"]
        for name, facts in read_registry().items()
        if not facts["is_ours"] and name not in contenders_of(record)
    ]
    heading = (
        "Times as fast as the fastest peer at the same or a finer precision. The model has four "
        f"layers (D = 256, FFN 1,024), and the document {lengths_of(longest)}. "
        f"Measured on {setting(record)}."
    )
    if missing:
        heading += f" Not measured there: {'; '.join(shortest_titles(missing))}."
    shown = [mechanism for mechanism in TITLES if mechanism in longest]
    rows = [["", "fastest peer", *(TITLES[mechanism] for mechanism in shown)]]
    rows.append(["---"] * len(rows[0]))
    rows += [_speed_cells(record, longest, shown, precision) for precision in PRECISIONS]
    if not any(cells[1] for cells in rows[2:]):
        rows = [[cells[0], *cells[2:]] for cells in rows]
    return textwrap.fill(heading, 118) + "\n\n" + "\n".join(map(row_of, rows))


def model_tables() -> str:
    """Return, for every record of models, its ratios, times and errors."""
    return "\n\n".join("\n\n".join(record_parts(r)) for r in read_records("models").values())


def peers_table() -> str:
    """Return the contenders of the registry, and the dates of those that a record has."""
    records = list(read_records("models").values())
    facts = read_registry()
    lines = [
        row_of(["", *(r["processor"]["title"] for r in records)]),
        row_of(["---"] * (len(records) + 1)),
    ]
    for name, each in sorted(facts.items(), key=lambda item: not item[1]["is_ours"]):
        lines.append(row_of([each["title"], *(_measured(record, name) for record in records)]))
    return "\n".join(lines)


def instructions_table() -> str:
    """Return the instructions per token of each kernel on aarch64."""
    record = json.loads(aarch64.RECORD.read_text("utf-8"))
    setting = (
        f"Instructions per token on QEMU's processor `{record['cpu']}`, for {record['tokens']} "
        f"tokens and {record['channels']} channels. Counted on {record['date']} in the code of "
        f"commit {record['commit']}, compiled by GCC {record['compiler'].split()[-1]}:"
    )
    return textwrap.fill(setting, 118) + "\n\n" + aarch64.table(record)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed_table,
    "models": model_tables,
    "recurrent": recurrent_tables,
    "encoders": encoder_tables,
    "documents": document_tables,
    "whole": document_sentence,
    "recipe": recipe_table,
    "families": families_table,
    "peers": peers_table,
    "instructions": instructions_table,
}


def widest(records: Mapping[str, Record]) -> Record:
    """Return the record with rows of the most contenders and mechanisms; of several, the latest."""

    def width(record: Record) -> tuple[int, str]:
        measured = {(row["contender"], row["mechanism"]) for row in record["rows"]}
        return len(measured), record["date"]

    return max(records.values(), key=width)


def contenders_of(record: Record) -> set[str]:
    """Return the names of the contenders that have rows."""
    return {row["contender"] for row in record["rows"]}


def shortest_titles(titles: Sequence[str]) -> list[str]:
    """Return the titles without those that extend another one, such as by a precision."""
    return [t for t in titles if not any(t != other and t.startswith(other) for other in titles)]


def lengths_of(longest: Mapping[str, int]) -> str:
    """Return the usual length, and those of the mechanisms that differ from it."""
    own = {mechanism: tokens for mechanism, tokens in longest.items() if mechanism != SOFTMAX}
    usual = max(own.values())
    others = [f"{TITLES[m]}: {tokens:,}" for m, tokens in own.items() if tokens != usual]
    return f"{usual:,} tokens" + (f" ({', '.join(others)})" if others else "")


def ratio_lines(record: Record, tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield a table: how many times as fast ours is as the best peer, and that peer's name."""
    yield row_of(["times as fast as the best peer", *PRECISIONS])
    yield row_of(["---"] * (len(PRECISIONS) + 1))
    groups = grouped(record["rows"])
    for mechanism in (m for m in TITLES if m in tokens):
        group = groups[mechanism, tokens[mechanism]]
        cells = [_ratio_cell(record, group, precision) for precision in PRECISIONS]
        yield row_of([TITLES[mechanism], *cells])


def length_lines(record: Record, lengths: Sequence[int], precision: str) -> Iterator[str]:
    """Yield a table: how many times as fast ours is as the best peer, by length.

    Beside a busy neighbour it compares the 95th percentiles.
    """
    groups = grouped(record["rows"])
    yield row_of([f"{precision}, times as fast", *(f"{tokens:,}" for tokens in lengths)])
    yield row_of(["---"] * (len(lengths) + 1))
    for mechanism in TITLES:
        own = [groups.get((mechanism, tokens), {}) for tokens in lengths]
        found = [_ratio(record, group, precision) for group in own]
        if any(found):
            yield row_of([TITLES[mechanism], *(each[0] if each else "" for each in found)])
        busy = [_ratio(record, _beside_neighbour(group), precision) for group in own]
        if any(busy):
            cells = (each[0] if each else "" for each in busy)
            yield row_of([f"{TITLES[mechanism]}, beside a neighbour", *cells])


def _beside_neighbour(group: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows with their 95th percentiles beside a busy neighbour as times."""
    return {
        name: {**row, "seconds": row["beside_neighbour"]["seconds_p95"]}
        for name, row in group.items()
        if row.get("beside_neighbour")
    }


def time_lines(record: Record, tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield a table: milliseconds of every contender, and the mechanisms that one cannot read."""
    groups = grouped(record["rows"])
    shown = [mechanism for mechanism in (*TITLES, SOFTMAX) if mechanism in tokens]
    names = [TITLES.get(mechanism, "softmax, for scale") for mechanism in shown]
    yield row_of(["milliseconds", *names, "largest error"])
    yield row_of(["---"] * (len(shown) + 2))
    asked = contenders_of(record) | {row["contender"] for row in record["cannot"]}
    refused = {(r["mechanism"], r["tokens"], r["contender"]): r["reason"] for r in record["cannot"]}
    for name in (n for n in record["contenders"] if n in asked):
        facts, cells = record["contenders"][name], []
        for mechanism in shown:
            row = groups[mechanism, tokens[mechanism]].get(name)
            reason = refused.get((mechanism, tokens[mechanism], name), "")
            cells.append(f"{row['seconds'] * 1e3:.0f}" if row else reason.partition(":")[0])
        errors = [r["error_float32"] for r in record["rows"] if r["contender"] == name]
        yield row_of([facts["title"], *cells, f"{max(errors):.0e}" if errors else ""])


def write_tables(pages: Sequence[str] = PAGES) -> None:
    """Replace every marked table of the pages by that of the records."""
    for page in pages:
        path = ROOT / page
        path.write_text(filled(path.read_text("utf-8")), "utf-8")


def filled(text: str) -> str:
    """Return a page with its marked tables from the records."""
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[4]}", text)


def record_parts(record: Record) -> Iterator[str]:
    """Yield the parts of a page that show a record of models."""
    yield f"### {record['processor']['title']}"
    yield f"Measured on {setting(record)}.{versions(record)}"
    if "note" in record:
        yield record["note"]
    if limits := limits_sentence(record):
        yield limits
    lengths = sorted({tokens for _, tokens in grouped(record["rows"])})
    if lengths[0] < DETAILED_TOKENS:
        for precision in PRECISIONS:
            yield "\n".join(length_lines(record, lengths, precision))
    for tokens in (each for each in lengths if each >= DETAILED_TOKENS):
        chosen = {m: n for m, n in grouped(record["rows"]) if n == tokens}
        yield f"At {tokens:,} tokens:"
        yield "\n".join(ratio_lines(record, chosen))
        yield "\n".join(time_lines(record, chosen))
    yield from _refusals(record)


def _refusals(record: Record) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in record["cannot"]:
        if row["reason"].startswith("left out"):  # the table says so
            continue
        title = record["contenders"][row["contender"]]["title"]
        titles = reasons.setdefault((row["mechanism"], row["reason"]), [])
        if title not in titles:
            titles.append(title)
    if reasons:
        yield "\n".join(
            f"- {TITLES.get(mechanism, mechanism)}, {', '.join(titles)}: {reason}."
            for (mechanism, reason), titles in reasons.items()
        )


def _ratio(record: Record, group: Mapping[str, Row], precision: str) -> tuple[str, str] | None:
    """Return a ratio to the best peer and its title, or None where one was not measured."""
    ours = group.get(f"aftexport_{precision}")
    best = best_peer(group.values(), record["contenders"], precision)
    if ours is None or best is None:
        return None
    title = record["contenders"][best["contender"]]["title"]
    if best["error_float32"] > LARGE_ERROR:
        title += f", error {best['error_float32']:.1f}"
    return label(best["seconds"] / ours["seconds"]), title


def _ratio_cell(record: Record, group: Mapping[str, Row], precision: str) -> str:
    found = _ratio(record, group, precision)
    return f"{found[0]} ({found[1]})" if found else "not measured"


def _speed_cells(
    record: Record, tokens: Mapping[str, int], mechanisms: Sequence[str], precision: str
) -> list[str]:
    """Return a precision's ratios; the peer is named once if it is the same for all."""
    groups = grouped(record["rows"])
    chosen = [groups[mechanism, tokens[mechanism]] for mechanism in mechanisms]
    found = [_ratio(record, group, precision) for group in chosen]
    titles = {each[1] if each else None for each in found}
    if len(titles) == 1 and (title := titles.pop()):
        return [precision, title, *(each[0] for each in found if each)]
    return [precision, "", *(_ratio_cell(record, group, precision) for group in chosen)]


def _measured(record: Record, name: str) -> str:
    """Return the date of a contender's rows, or the reason for their absence."""
    if name in contenders_of(record):
        return str(record["date"])
    reasons = [row["reason"] for row in record["cannot"] if row["contender"] == name]
    return reasons[0].partition(":")[0] if reasons else "not measured"


def write_registry() -> None:
    """Write the contenders of all modules, where their packages are installed."""
    prepare(threads=1)
    # Imported once the peers are on the path.
    from benchmarks.contenders import MISSING, MODELS

    if not MISSING:
        write_record({name: each.facts for name, each in MODELS.items()}, REGISTRY)


if __name__ == "__main__":
    write_registry()
    write_tables()
    pictures.draw_all(widest(read_records("models")))
    draw_latest()
