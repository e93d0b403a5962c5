"""The tables of README and documentation, from the records.

PYTHONPATH=tests:tests/support .venv/bin/python -m benchmarks.tables
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import model_plot
from benchmarks.peers import PRECISIONS, Row, best_peer, grouped
from benchmarks.record import read_records
from benchmarks.titles import TITLES, label
from benchmarks.workloads import SOFTMAX

Record = Mapping[str, Any]
ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/benchmarks.md")
LARGE_ERROR = 0.1
"""The error of a peer, relative to the largest logit, above which a ratio names it."""
MARKED = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def speed_table() -> str:
    """Return the README's table: the record with the most peers, at its longest documents."""
    record = widest(read_records("models"))
    longest = dict(sorted(grouped(record["rows"])))
    peers = [facts["title"] for facts in record["contenders"].values() if not facts["is_ours"]]
    heading = (
        f"A model of four layers (D = 256, FFN 1,024), one document of {lengths_of(longest)}: "
        f"times as fast as the fastest peer at the same or a finer precision. {setting(record)}. "
        f"Peers: {'; '.join(peers)}."
    )
    columns = [_cells(line) for line in ratio_lines(record, longest)]
    del columns[1]  # the line under the titles
    titles, *rows = (list(cells) for cells in zip(*columns, strict=True))
    lines = [row_of(["", *titles[1:]]), row_of(["---"] * len(titles)), *map(row_of, rows)]
    return f"{heading}\n\n" + "\n".join(lines)


def model_tables() -> str:
    """Return, for every record of models, its ratios, times and errors."""
    return "\n\n".join("\n\n".join(_record_parts(r)) for r in read_records("models").values())


def peers_table() -> str:
    """Return the contenders that each record of models has."""
    records = list(read_records("models").values())
    facts: dict[str, Any] = {}
    for record in records:
        facts = record["contenders"] | facts
    lines = [
        row_of(["", *(r["processor"]["title"] for r in records)]),
        row_of(["---"] * (len(records) + 1)),
    ]
    for name, each in sorted(facts.items(), key=lambda item: not item[1]["is_ours"]):
        cells = [r["date"] if name in r["contenders"] else "not measured" for r in records]
        lines.append(row_of([each["title"], *cells]))
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed_table,
    "models": model_tables,
    "peers": peers_table,
}


def widest(records: Mapping[str, Record]) -> Record:
    """Return the record with the most contenders; of several, the latest."""
    return max(records.values(), key=lambda record: (len(record["contenders"]), record["date"]))


def setting(record: Record) -> str:
    """Return the processor, the threads and the date of a record."""
    processor = record["processor"]
    numbers = f"family {processor['family']}"
    if processor["model"] is not None:
        numbers += f", model {processor['model']}"
    date = record["date"]
    return f"{processor['title']} ({numbers}), {record['threads']} threads, measured on {date}"


def lengths_of(longest: Mapping[str, int]) -> str:
    """Return the usual length, and those of the mechanisms that differ from it."""
    own = {mechanism: tokens for mechanism, tokens in longest.items() if mechanism != SOFTMAX}
    usual = max(own.values())
    others = [f"{TITLES[m]}: {tokens:,}" for m, tokens in own.items() if tokens != usual]
    return f"{usual:,} tokens" + (f" ({', '.join(others)})" if others else "")


def ratio_lines(record: Record, tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield a table: how many times as fast ours is as the best peer, and that peer's name.

    Args:
        record: a record of models.
        tokens: the length to show of each mechanism.
    """
    yield row_of(["times as fast as the best peer", *PRECISIONS])
    yield row_of(["---"] * (len(PRECISIONS) + 1))
    groups = grouped(record["rows"])
    for mechanism in (m for m in TITLES if m in tokens):
        group = groups[mechanism, tokens[mechanism]]
        cells = [_ratio_cell(record, group, precision) for precision in PRECISIONS]
        yield row_of([TITLES[mechanism], *cells])


def time_lines(record: Record, tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield a table: milliseconds of every contender, and the mechanisms that one cannot read.

    Args:
        record: a record of models.
        tokens: the length to show of each mechanism.
    """
    groups = grouped(record["rows"])
    shown = [mechanism for mechanism in (*TITLES, SOFTMAX) if mechanism in tokens]
    names = [TITLES.get(mechanism, "softmax, for scale") for mechanism in shown]
    yield row_of(["milliseconds", *names, "largest error"])
    yield row_of(["---"] * (len(shown) + 2))
    refused = {(r["mechanism"], r["tokens"], r["contender"]): r["reason"] for r in record["cannot"]}
    for name, facts in record["contenders"].items():
        cells = []
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


def row_of(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |" if cells[0] != "---" else "|" + "---|" * len(cells)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _record_parts(record: Record) -> Iterator[str]:
    yield f"### {record['processor']['title']}"
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    yield f"{setting(record)}{f', with {versions}' if versions else ''}."
    if "note" in record:
        yield record["note"]
    if limits := _limits(record):
        yield limits
    lengths = sorted({tokens for _, tokens in grouped(record["rows"])})
    for tokens in lengths:
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


def _limits(record: Record) -> str:
    measured = [row["limits"] for row in record["rows"] if "limits" in row]
    if not measured:
        return ""
    best = {kind: max(limits[kind] for limits in measured) for kind in measured[0]}
    rates = ", ".join(f"{rate:.0f} in {kind}" for kind, rate in best.items() if kind != "copy")
    return (
        f"The processor's limits in the same run, at their best: {rates} (billions of "
        f"multiply-adds a second from registers), and copies of {best['copy']:.0f} GB/s."
    )


def _ratio_cell(record: Record, group: Mapping[str, Row], precision: str) -> str:
    ours = group.get(f"aftexport_{precision}")
    best = best_peer(group.values(), record["contenders"], precision)
    if ours is None or best is None:
        return "not measured"
    title = record["contenders"][best["contender"]]["title"]
    if best["error_float32"] > LARGE_ERROR:
        title += f", error {best['error_float32']:.1f}"
    return f"{label(best['seconds'] / ours['seconds'])} ({title})"


if __name__ == "__main__":
    write_tables()
    model_plot.draw(widest(read_records("models")), model_plot.PICTURE)
