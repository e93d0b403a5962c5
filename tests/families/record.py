"""The record of the families, one row a line, and its table in the documentation."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table_parts import row_of

RECORD = Path(__file__).with_name("record.json")
Row = dict[str, Any]
_HEADING = (
    *("family", "class", "operators", "largest error", "longest document"),
    *("longer than memory", "append", "evidence", "bf16", "int8"),
)
_REASONS = {
    "not_longer_than_memory": "longer than memory",
    "not_append": "append",
    "not_evidence": "evidence",
}


def read_rows() -> list[Row]:
    """Return the rows of the record; none before the first run."""
    rows: list[Row] = json.loads(RECORD.read_text("utf-8"))["families"] if RECORD.exists() else []
    return rows


def write_rows(rows: Sequence[Row]) -> None:
    """Write the record, with the version of transformers."""
    from importlib.metadata import version

    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    head = f'{{\n "transformers": {json.dumps(version("transformers"))},\n "families": [\n'
    RECORD.write_text(f"{head}{lines}\n ]\n}}\n", "utf-8")


def families_table() -> str:
    """Return the table of the families, and the reasons for what they lack."""
    record = json.loads(RECORD.read_text("utf-8"))
    rows = record["families"]
    exported = [row for row in rows if "refused" not in row]
    parts = [
        f"Exported from transformers {record['transformers']}: {len(exported)} of {len(rows)} "
        "families.",
        "\n".join(map(row_of, [_HEADING, ["---"] * len(_HEADING), *map(_cells, exported)])),
    ]
    if refused := [row for row in rows if "refused" in row]:
        lines = [f"- **{row['family']}** (`{row['class']}`): {row['refused']}" for row in refused]
        parts += ["Refused:", "\n".join(lines)]
    return "\n\n".join([*parts, "Why a family lacks something:", "\n".join(_reasons(exported))])


def _cells(row: Row) -> list[str]:
    operators = [f"{count} {name}" for name, count in row["operators"].items()]
    has = ["no" if row[name] else "yes" for name in _REASONS]
    precisions = [_precision(row, name) for name in ("bf16", "int8")]
    return [
        *(row["family"], f"`{row['class']}`", ", ".join(operators) or "standard only"),
        *(f"{max(row['parity'], row['error']):.0e}", f"{row['max_tokens']:,} tokens"),
        *(*has, *precisions),
    ]


def _precision(row: Row, name: str) -> str:
    return row[name].get("title", "no") if name in row else "not measured"


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each reason, with the families that it holds for."""
    families: dict[str, list[str]] = {}
    for row in rows:
        reasons = [f"{what}: {row[name]}" for name, what in _REASONS.items() if row[name]]
        reasons += [
            f"{precision}: {row[precision]['refused']}"
            for precision in ("bf16", "int8")
            if "refused" in row.get(precision, {})
        ]
        for reason in reasons:
            families.setdefault(reason, []).append(row["family"])
    return [f"- {reason.rstrip('.')} ({', '.join(names)})." for reason, names in families.items()]
