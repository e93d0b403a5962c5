"""The parts that the tables of all records share."""

from collections.abc import Mapping, Sequence
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
