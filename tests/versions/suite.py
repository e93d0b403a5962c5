"""A run of a part of the suite in an environment, and the record: its last run in each."""

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from versions.matrix import ROOT, Known

RECORD = Path(__file__).with_name("record.json")
LIBRARIES = ("torch", "onnxscript", "onnx", "onnxruntime", "uvicorn", "numpy")
"""Libraries whose versions a row has."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        passed, skipped: counts of tests.
        failed: the names of tests that failed.
        cpu_seconds: processor time of the run.
    """

    passed: int
    skipped: int
    failed: tuple[str, ...]
    cpu_seconds: int

    def unexpected(self, known: Sequence[Known]) -> list[str]:
        """Return the failed tests that are not known, and known ones that pass."""
        names = {name for entry in known for name in entry.tests}
        failed = {test.partition("[")[0] for test in self.failed}
        return sorted(failed - names) + [f"{name} (passes)" for name in sorted(names - failed)]


def run_suite(python: Path, tests: Sequence[str]) -> Outcome:
    """Run files of tests with the packages of an environment, in one process.

    Raises:
        RuntimeError: if pytest cannot run them.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", *tests]
        environment = {k: v for k, v in os.environ.items() if k not in ("CI", "PYTHONPATH")}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [str(python), "-m", "pytest", *words]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if code not in (0, 1) or not report.exists():
            raise RuntimeError(f"pytest ended with status {code} before it ran the tests")
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return read_report(report, round(seconds))


def read_report(report: Path, cpu_seconds: int) -> Outcome:
    """Read the XML report of pytest."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return Outcome(
        passed=len(cases) - len(failed) - len(skipped),
        skipped=len(skipped),
        failed=tuple(sorted(c.attrib["name"] for c in failed)),
        cpu_seconds=cpu_seconds,
    )


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
