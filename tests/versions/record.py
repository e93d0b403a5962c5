"""The committed record of runs, one row for each environment: its last run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("record.json")
LIBRARIES = ("torch", "onnxscript", "onnx", "onnxruntime", "uvicorn", "numpy")
"""Libraries whose versions a row has."""
Row = dict[str, Any]


def read_record() -> list[Row]:
    """Return the rows in the order of the file."""
    rows: list[Row] = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else []
    return rows


def names_with(digest: str, rows: Iterable[Row]) -> set[str]:
    """Return the environments whose last run had the tests of a digest."""
    return {row["name"] for row in rows if row["tests"] == digest}


def put_row(row: Row) -> None:
    """Add a row in place of an earlier one with its name."""
    rows = [*(r for r in read_record() if r["name"] != row["name"]), row]
    rows.sort(key=lambda r: r["name"])
    RECORD.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", "utf-8")
