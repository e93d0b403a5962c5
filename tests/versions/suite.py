"""A run of a part of the suite in an environment, and the record: its last run in each."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from interpreters import find_python

from versions.matrix import ROOT, Environment, Known

RECORD = Path(__file__).with_name("record.json")
LIBRARIES = ("torch", "onnxscript", "onnx", "onnxruntime", "uvicorn", "numpy")
"""Libraries whose versions a row has."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

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


EXTRAS = "calibrate,client,cpu,torch"
TOOLS = ("httpx", "hypothesis", "packaging", "pytest", "pytest-xdist", "scikit-learn")
"""Packages that the tests import beside those of the extras."""
MADE = "made"
"""A file in a finished environment."""


def pip(python: Path, *words: str) -> str:
    """Run pip, and return its standard output."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return done.stdout


def make_environment(environment: Environment, folder: Path, wheel: Path) -> Path:
    """Make an environment with the wheel of this checkout, and return its interpreter.

    A finished environment gets only the wheel.
    """
    python = folder / "bin" / "python"
    if not (folder / MADE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        base = find_python(environment.python)
        subprocess.run([base, "-m", "venv", folder], check=True)
        pip(python, "install", "--quiet", "--no-cache-dir", *environment.packages)
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(free_constraints(installed(python))), "utf-8")
        options = ["--quiet", "--no-cache-dir", "--constraint", str(constraints)]
        pip(python, "install", *options, f"aftexport[{EXTRAS}] @ {wheel.as_uri()}", *TOOLS)
        (folder / MADE).touch()
    pip(python, "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel))
    return python


def installed(python: Path) -> dict[str, str]:
    """Return the version of each package of an environment, by lower-case name."""
    packages = json.loads(pip(python, "list", "--format", "json"))
    return {p["name"].lower().replace("_", "-"): p["version"] for p in packages}


def free_constraints(taken: Iterable[str]) -> list[str]:
    """Return the lines of ``constraints.txt`` for packages that are not installed yet."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    names = set(taken)
    return [x for x in lines if x.partition("==")[0].lower().replace("_", "-") not in names]


def make_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout, which fits every interpreter, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--wheel-dir", str(folder)]
    pip(Path(sys.executable), "wheel", *options, ".")
    (wheel,) = folder.glob("*-py3-none-*.whl")
    return wheel.resolve()
