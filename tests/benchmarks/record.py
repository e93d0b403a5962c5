"""The record of a run: its processor, its contenders, their versions and its rows."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from benchmarks.processor import read_processor

Row = dict[str, Any]
Kind = Literal["models", "operators", "chunks"]
_SETTING = ("date", "processor", "threads", "rounds", "versions", "contenders")
FOLDER = Path(__file__).with_name("records")
PACKAGES = ("torch", "onnxruntime", "openvino", "nncf")


@dataclass
class Refusals:
    """The runs that a contender cannot do, and those that were left out on purpose.

    Attributes:
        rows: mechanism, tokens, contender and reason of each refusal.
        left_out: a sentence for each group of runs that were not tried.
    """

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, mechanism: str, tokens: int, contender: str, reason: str) -> None:
        """Add a refusal, such as ``cannot read: ...``."""
        self.rows.append(
            {"mechanism": mechanism, "tokens": tokens, "contender": contender, "reason": reason}
        )


def make_record(
    rows: Sequence[Row],
    contenders: Mapping[str, Mapping[str, Any]],
    refusals: Refusals,
    *,
    threads: int,
    rounds: int,
) -> dict[str, Any]:
    """Return a record of the rows, with all that tables and pictures need.

    Args:
        rows: the measurements.
        contenders: the properties of the contenders that were asked for, by name.
        refusals: the runs that are missing, and why.
        threads: number of threads of each contender.
        rounds: timed rounds.
    """
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": json.loads(json.dumps(asdict(read_processor()))),  # tuples become lists
        "load": os.getloadavg()[2],  # of 15 minutes: other work on the machine shows in it
        "threads": threads,
        "rounds": rounds,
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
        "contenders": dict(contenders),
        "cannot": refusals.rows,
        "left_out": refusals.left_out,
        "rows": list(rows),
    }


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def merge_records(earlier: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with the mechanisms that only an earlier part of the same run has.

    Args:
        earlier: the record so far; it is replaced as a whole if it is of another setting.
        record: the record of the mechanisms that were measured now.
    """
    if any(earlier.get(name) != record[name] for name in _SETTING):
        return dict(record)
    measured = {row["mechanism"] for row in (*record["rows"], *record["cannot"])}
    merged = dict(record)
    for name in ("rows", "cannot"):
        kept = [row for row in earlier[name] if row["mechanism"] not in measured]
        merged[name] = kept + record[name]
    merged["left_out"] = list(dict.fromkeys(earlier["left_out"] + record["left_out"]))
    merged["load"] = max(earlier["load"], record["load"])
    return merged


def read_records(kind: Kind) -> dict[str, dict[str, Any]]:
    """Return the committed records of a kind, the latest first, by the slug of the processor."""
    paths = FOLDER.glob(f"{kind}-*.json")
    records = {p.stem.partition("-")[2]: json.loads(p.read_text("utf-8")) for p in paths}
    return dict(sorted(records.items(), key=lambda item: (item[1]["date"], item[0]), reverse=True))


def record_path(kind: Kind) -> Path:
    """Return the path of this processor's record."""
    return FOLDER / f"{kind}-{read_processor().slug}.json"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
