"""The tables of whole documents, windows and truncation, from the records."""

import textwrap
from collections.abc import Callable, Container, Iterator, Sequence
from statistics import mean

from benchmarks.documents.contenders import LOCAL, PARTS
from benchmarks.documents.run import DEBIAN, SERVED
from benchmarks.record import read_records
from benchmarks.table_parts import Record, Row, row_of, setting, versions

Cell = Callable[[Sequence[Row]], str]
TITLES = {
    "contains": "Which families of licences a document contains",
    "dominant": "Which family covers the most tokens of a document",
    "conflict": "Whether two families stand in one document, further apart than a window",
}

QUESTIONS = {
    "contains": "which licences it contains",
    "dominant": "which one covers most of it",
    "conflict": "whether two far-apart ones conflict",
}
SHOWN = 8_192
PLACE = "docs/benchmarks.md#whole-documents-windows-and-truncation"


def document_tables() -> str:
    """Return, for every record, the quality and the cost of each contender by length."""
    records = list(read_records("documents").values())
    if not records:
        return "No record exists yet: `make bench-documents BENCH=--record` writes one."
    return "\n\n".join(part for record in records for part in record_parts(record))


def recipe_table() -> str:
    """Return what each part of the recipe is worth, by the latest record."""
    record = _latest()
    table = _table(record, ["contains", DEBIAN], _quality, (LOCAL, *PARTS))
    return f"*contains*, F1 (average precision), {setting(record)}:\n\n{table}"


def document_sentence() -> str:
    """Return the README's line, by the latest record."""
    record = _latest()
    said = [f"{question} {_compared(record, task)}" for task, question in QUESTIONS.items()]
    text = f"F1 at {SHOWN:,} tokens: {'; '.join(said)}. [All figures]({PLACE})."
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def _latest() -> Record:
    return next(iter(read_records("documents").values()))


def _compared(record: Record, task: str) -> str:
    """Return the F1 of the whole document, of the best form of windows and of the beginning."""

    def found(name: str) -> str:
        key = (task, SHOWN, name)
        rows = record["rows"]
        own = [r for r in rows if (r["mechanism"], r["tokens"], r["contender"]) == key]
        return _mean(own, "f1")

    windows = max(map(found, ("window_max", "window_mean", "window_learned")))
    return f"{found(LOCAL)} whole, {windows} in windows, {found('first')} cut at 512"


def record_parts(record: Record) -> Iterator[str]:
    """Yield the parts of a page that show a record."""
    yield f"### Documents on {record['processor']['title']}"
    yield (
        f"Measured on {setting(record)}.{versions(record)} Texts of {record['package']}; "
        f"{record['rounds']} seeds, and {record['recipe']['seconds']:.0f} seconds of processor "
        "time for each training."
    )
    for task, title in TITLES.items():
        yield f"{title}, F1 (average precision):"
        yield _table(record, [task, DEBIAN] if task == "contains" else [task], _quality)
        yield "False alarms on documents without it; calibration error before and after:"
        yield _table(record, [task], _caution)
    yield "The served bundle, one document: seconds; tokens a second; MiB beyond the weights:"
    yield _table(record, [SERVED], _cost)
    if record["left_out"]:
        yield "\n".join(f"- Left out: {line}." for line in record["left_out"])


def _table(
    record: Record, kinds: Sequence[str], cell: Cell, shown: Container[str] | None = None
) -> str:
    """Return a table of contenders by length; a cell has the rows of all seeds."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in record["rows"]:
        groups.setdefault((row["mechanism"], row["tokens"], row["contender"]), []).append(row)
    columns = sorted(
        {key[:2] for key in groups if key[0] in kinds}, key=lambda c: (kinds.index(c[0]), c[1])
    )
    heads = ["Debian's files" if k == DEBIAN else f"{n:,} tokens" for k, n in columns]
    lines = [row_of(["contender", *heads]), row_of(["---"] * (len(heads) + 1))]
    for name, facts in record["contenders"].items():
        if shown is not None and name not in shown:
            continue
        cells = [cell(own) if (own := groups.get((*c, name))) else "" for c in columns]
        lines += [row_of([facts["title"], *cells])] if any(cells) else []
    return "\n".join(lines)


def _quality(rows: Sequence[Row]) -> str:
    return f"{_mean(rows, 'f1')} ({_mean(rows, 'average_precision')})"


def _caution(rows: Sequence[Row]) -> str:
    alarms = "" if rows[0]["false_alarms"] is None else f"{_mean(rows, 'false_alarms')}; "
    return f"{alarms}{_mean(rows, 'error_before')}, {_mean(rows, 'error_after')}"


def _cost(rows: Sequence[Row]) -> str:
    peak = "" if rows[0]["peak_mib"] is None else f"; {rows[0]['peak_mib']:,.0f}"
    return f"{rows[0]['seconds']:.2g}; {rows[0]['tokens_per_second']:,.0f}{peak}"


def _mean(rows: Sequence[Row], name: str) -> str:
    return f"{mean(row[name] for row in rows):.2f}"
