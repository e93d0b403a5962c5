"""The parts that the tables of all records share."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


def setting(record: Record) -> str:
    """Return the date, the processor, the threads and the commit of a record."""
    processor = record["processor"]
    if processor["vendor"].startswith("0x"):
        numbers = f"implementer {processor['vendor']}, part {processor['model']:#x}"
    else:
        numbers = f"family {processor['family']}"
        if processor["model"] is not None:
            numbers += f", model {processor['model']}"
    commit = record["commit"]
    code = "an unknown commit" if commit == "unknown" else f"commit {commit}"
    threads = f"{record['threads']} threads"
    named = f"{processor['title']} ({numbers})"
    return f"{record['date']} on {named}, with {threads} and the code of {code}"


def versions(record: Record) -> str:
    """Return a sentence with the versions of a record, if it has them."""
    named = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f" Versions: {named}." if named else ""


def row_of(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return "| " + " | ".join(cells) + " |" if cells[0] != "---" else "|" + "---|" * len(cells)


Row = Mapping[str, Any]
Facts = Mapping[str, Mapping[str, Any]]
PRECISIONS = ("fp32", "bf16", "int8")
"""From the finest to the coarsest."""


def best_peer(rows: Iterable[Row], contenders: Facts, precision: str = "fp32") -> Row | None:
    """Return the fastest row of a peer at a precision or a finer one, whatever its error."""
    allowed = PRECISIONS[: PRECISIONS.index(precision) + 1]
    peers = [
        row
        for row in rows
        if (facts := contenders[row["contender"]])["precision"] in allowed
        and not facts["is_ours"]
        and facts["is_same_function"]
    ]
    return min(peers, key=lambda row: row["seconds"], default=None)


def grouped(rows: Iterable[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    """Return rows by mechanism and length, then by contender."""
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["mechanism"], row["tokens"]), {})[row["contender"]] = row
    return groups


TITLES = {
    "aft_full": "AFT-full",
    "aft_local": "AFT-local, s = 128",
    "aft_simple": "AFT-simple",
    "aft_conv": "AFT-conv, 31 taps",
    "efficient_attention": "Efficient Attention",
    "fastformer": "Fastformer",
    "linear_attention": "linear attention",
}


def label(ratio: float) -> str:
    """Return a ratio with two digits, as the tables show it."""
    return f"{ratio:.1f}" if ratio < 9.95 else f"{ratio:.0f}"


def limits_sentence(record: Record) -> str:
    """Return a sentence with the rates that were measured beside the rows, if there are any."""
    measured = [row["limits"] for row in record["rows"] if "limits" in row]
    if not measured:
        return ""
    best = {kind: max(limits[kind] for limits in measured) for kind in measured[0]}
    rates = ", ".join(f"{rate:.0f} in {kind}" for kind, rate in best.items() if kind != "copy")
    return (
        f"The processor's limits in the same run, at their best: {rates} (billions of "
        f"multiply-adds a second from registers), and copies of {best['copy']:.0f} GB/s."
    )
