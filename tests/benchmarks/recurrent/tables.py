"""The tables of recurrent linear attention, from the records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.record import Row, read_records
from benchmarks.table_parts import Record, label, row_of, setting, versions

OURS = "aftexport_fp32"
_PEERS = {"onnxruntime": "ONNX Runtime", "torch_compile": "torch.compile"}
_TITLES = {"linear": "linear", "gated": "gated", "delta": "delta", "gated_delta": "gated delta"}
Group = Mapping[tuple[str, str], Mapping[str, Any]]
"""The rows of one size and number of threads, by rule and contender."""


def recurrent_tables() -> str:
    """Return, for every record, its times, ratios, bounds and memory."""
    records = read_records("recurrent").values()
    return (
        "\n\n".join("\n\n".join(record_parts(record)) for record in records)
        or "No record exists yet."
    )


def record_parts(record: Record) -> Iterator[str]:
    """Yield the parts of a page that show a record."""
    yield f"#### {record['processor']['title']}"
    yield (
        f"Measured on {setting(record)}.{versions(record)} Load of the machine over 15 minutes: "
        f"{record['load']:.1f}. Command: {' and '.join(f'`{c}`' for c in record['commands'])}."
    )
    groups: dict[tuple[int, ...], dict[tuple[str, str], Row]] = {}
    for row in record["rows"]:
        names = ("batch", "tokens", "heads", "width", "threads")
        group = groups.setdefault(tuple(row[name] for name in names), {})
        group[row["rule"], row["contender"]] = row
    for (*size, threads), group in groups.items():
        yield _heading(size, threads, group)
        yield "\n".join(time_lines(record, group))
    yield "\n".join(memory_lines(record))
    if record["cannot"]:
        yield "\n".join(_refusals(record))


def time_lines(record: Record, group: Group) -> Iterator[str]:
    """Yield the times of one size, the bound, and the ratios to both."""
    rules = [rule for rule in _TITLES if (rule, OURS) in group]
    yield row_of(["milliseconds", *(_TITLES[rule] for rule in rules)])
    yield row_of(["---"] * (len(rules) + 1))
    for name, facts in record["contenders"].items():
        rows = [group.get((rule, name)) for rule in rules]
        yield row_of([facts["title"], *(f"{r['seconds'] * 1e3:.1f}" if r else "" for r in rows)])
    own = [group[rule, OURS] for rule in rules]
    bounds = [bound_of(row) for row in own]
    yield row_of(["bound of the machine", *(f"{s * 1e3:.1f} ({kind})" for s, kind in bounds)])
    for name, title in _PEERS.items():
        peers = [group.get((rule, name)) for rule in rules]
        ratios = [
            label(peer["seconds"] / row["seconds"]) if peer else ""
            for peer, row in zip(peers, own, strict=True)
        ]
        yield row_of([f"times as fast as {title}", *ratios])
    over = [label(row["seconds"] / bound) for row, (bound, _) in zip(own, bounds, strict=True)]
    yield row_of(["time over the bound", *over])


def memory_lines(record: Record) -> Iterator[str]:
    """Yield the memory beyond inputs and output, by length."""
    found = {(r["contender"], r["tokens"], r["rule"]): r["beyond_mib"] for r in record["memory"]}
    rules = [rule for rule in _TITLES if rule in {rule for *_, rule in found}]
    yield row_of(["MiB beyond inputs and output", *(_TITLES[rule] for rule in rules)])
    yield row_of(["---"] * (len(rules) + 1))
    for name, tokens in dict.fromkeys((name, tokens) for name, tokens, _ in found):
        title = record["contenders"][name]["title"]
        mib = [found.get((name, tokens, rule)) for rule in rules]
        cells = ["" if m is None else f"{m:.1f}" for m in mib]
        yield row_of([f"{title}, {tokens:,} tokens", *cells])


def _heading(size: Sequence[int], threads: int, group: Group) -> str:
    batch, tokens, heads, width = size
    documents = "One document" if batch == 1 else f"{batch} documents"
    of_heads = f"one head of {width}" if heads == 1 else f"{heads} heads of {width}"
    rows = list(group.values())
    used = "one thread" if threads == 1 else f"{threads} threads"
    rates = {kind: max(row["limits"][kind] for row in rows) for kind in ("fp32", "copy")}
    return (
        f"{documents} of {tokens:,} tokens, {of_heads} channels, {used}, {rows[0]['clock']} time; "
        f"at best {rates['fp32']:.0f} billion multiply-adds a second, and copies of "
        f"{rates['copy']:.0f} GB/s:"
    )


def _refusals(record: Record) -> Iterator[str]:
    for row in record["cannot"]:
        title = record["contenders"][row["contender"]]["title"]
        rule = _TITLES[row["mechanism"].split()[-1]]
        yield f"- {rule}, {row['tokens']:,} tokens, {title}: {row['reason']}."


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
