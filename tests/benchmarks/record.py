"""The record of a run: its processor, its contenders, their versions and its rows."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.processor import read_processor

if TYPE_CHECKING:  # a GPU machine lacks it
    from rich.console import Console

Row = dict[str, Any]
Kind = Literal["models", "operators", "chunks", "recurrent", "encoders", "documents"]
FOLDER = Path(__file__).with_name("records")
ROOT = Path(__file__).parents[2]
MEASURED_FOLDERS = ("export", "plugins", "pyproject.toml")
"""The paths that a commit names in a record: changes in others do not change what is measured."""
REGISTRY = FOLDER / "contenders.json"
"""The contenders for models that this checkout knows: tables need no peer installed."""
PACKAGES = ("torch", "onnxruntime", "openvino", "nncf")


class RecordError(Exception):
    """A run would drop rows of a record."""


@dataclass
class Refusals:
    """The runs that a contender cannot do, and those that were left out on purpose."""

    rows: list[Row] = field(default_factory=list)
    """Mechanism, tokens, contender and reason of each refusal."""
    left_out: list[str] = field(default_factory=list)
    """A sentence for each group of runs that were not tried."""

    def add(self, mechanism: str, tokens: int, contender: str, reason: str) -> None:
        """Add a refusal, such as ``cannot read: ...``."""
        self.rows.append(
            {"mechanism": mechanism, "tokens": tokens, "contender": contender, "reason": reason}
        )

    def show(self, console: "Console") -> None:
        """Print every refusal."""
        for row in self.rows:
            console.print("{contender} of {mechanism}, {tokens:,} tokens {reason}".format_map(row))
        for line in dict.fromkeys(self.left_out):
            console.print(f"left out: {line}")


@dataclass(frozen=True)
class Output:
    """The file of a run, the properties that its rows share, and the record that it continues."""

    path: Path
    setting: dict[str, Any]
    earlier: dict[str, Any] | None

    def write(self, rows: Sequence[Row], refusals: Refusals, **further: Any) -> dict[str, Any]:
        """Write and return all that tables and pictures need."""
        record = make_record(self.setting, rows, refusals, self.earlier) | further
        write_record(record, self.path)
        return record


def start(
    kind: Kind,
    options: argparse.Namespace,
    contenders: Mapping[str, Mapping[str, Any]],
    rounds: int,
) -> Output:
    """Return the output of a run: this processor's record, or a file of the build folder.

    Raises:
        RecordError: if the record has rows of another setting, which stay.
    """
    build = {"operators": "bench", "models": "bench_model"}.get(kind, f"bench_{kind}")
    path = options.out or (record_path(kind) if options.record else Path(f"build/{build}.json"))
    setting = read_setting(contenders, threads=options.threads, rounds=rounds)
    earlier = read_earlier(path, setting, replace=options.replace) if options.record else None
    return Output(path, setting, earlier)


def read_setting(
    contenders: Mapping[str, Mapping[str, Any]], *, threads: int, rounds: int
) -> dict[str, Any]:
    """Return the properties that all rows of a record share."""
    setting = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": read_commit(),
        "processor": asdict(read_processor()),
        "threads": threads,
        "rounds": rounds,
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
        "contenders": dict(contenders),
    }
    parsed: dict[str, Any] = json.loads(json.dumps(setting))  # tuples become lists
    return parsed


def make_record(
    setting: Mapping[str, Any],
    rows: Sequence[Row],
    refusals: Refusals,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a record of the rows.

    An earlier record of the same setting keeps the rows of mechanisms and lengths that were not
    measured now.
    """
    record = {
        **setting,
        "commands": [shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])],
        "load": os.getloadavg()[2],  # of 15 minutes: other work on the machine shows in it
        "cannot": list(refusals.rows),
        "left_out": list(refusals.left_out),
        "rows": list(rows),
    }
    if earlier is None:
        return record
    measured = {(row["mechanism"], row["tokens"]) for row in (*rows, *refusals.rows)}
    for name in ("rows", "cannot"):
        kept = [row for row in earlier[name] if (row["mechanism"], row["tokens"]) not in measured]
        record[name] = kept + record[name]
    for name in ("left_out", "commands"):
        record[name] = list(dict.fromkeys(earlier.get(name, []) + record[name]))
    record["load"] = max(earlier["load"] or 0.0, record["load"])
    return record


def write_record(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = (f" {json.dumps(name)}: {_lines(value)}" for name, value in record.items())
    path.write_text("{\n" + ",\n".join(members) + "\n}\n", "utf-8")


def _lines(value: Any) -> str:
    """Return a member of a record as JSON: a line for each row, or one line."""
    if isinstance(value, Mapping) and any(isinstance(each, Mapping) for each in value.values()):
        rows = [f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
        return "{\n" + ",\n".join(rows) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"
    return json.dumps(value)


def read_earlier(path: Path, setting: Mapping[str, Any], *, replace: bool) -> dict[str, Any] | None:
    """Return the record that a run continues, or None; ``replace`` drops rows of another setting.

    Raises:
        RecordError: if the file has rows of another setting.
    """
    if not path.exists():
        return None
    earlier: dict[str, Any] = json.loads(path.read_text("utf-8"))
    differing = [name for name in setting if earlier.get(name) != setting[name]]
    if not differing:
        return earlier
    if replace or not earlier["rows"]:
        return None
    raise RecordError(
        f"Expected in {path.name} a record of this run's setting, got {len(earlier['rows'])} rows "
        f"with another {', '.join(differing)}. Pass --replace to drop them, or --out FILE."
    )


def read_commit() -> str:
    """Return the commit of the kernels and the exporter, with a sign of uncommitted changes."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--", *MEASURED_FOLDERS)
    except (FileNotFoundError, subprocess.CalledProcessError):  # a source archive has no history
        return "unknown"
    return f"{commit} with changes" if changes else commit


def read_registry() -> dict[str, dict[str, Any]]:
    """Return the properties of all contenders for models, by name."""
    facts: dict[str, dict[str, Any]] = json.loads(REGISTRY.read_text("utf-8"))
    return facts


def read_records(kind: Kind) -> dict[str, dict[str, Any]]:
    """Return the committed records of a kind, the latest first, by the slug of the processor."""
    paths = FOLDER.glob(f"{kind}-*.json")
    records = {p.stem.partition("-")[2]: json.loads(p.read_text("utf-8")) for p in paths}
    return dict(sorted(records.items(), key=lambda item: (item[1]["date"], item[0]), reverse=True))


def record_path(kind: Kind) -> Path:
    """Return the path of this processor's record."""
    return FOLDER / f"{kind}-{read_processor().slug}.json"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
