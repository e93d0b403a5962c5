"""Running the commands, in this process and as processes of their own."""

import hashlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from aftexport.cli import main

Capture = pytest.CaptureFixture[str]


@dataclass(frozen=True)
class Outcome:
    code: int | str | None
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """This process's environment; relative entries of PYTHONPATH would not hold elsewhere."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    absolute = os.pathsep.join(str(Path(path).resolve()) for path in paths if path)
    return os.environ | {"PYTHONPATH": absolute} | changes


def run_python(*words: str | Path, cwd: Path, **changes: str) -> Outcome:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,  # a Ray whose machine does other things takes its time
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def without(modules: Sequence[str], package: str, *words: str | Path, cwd: Path) -> Outcome:
    """Runs ``package``'s command where ``modules`` cannot be imported."""
    blocked = dict.fromkeys(modules)
    code = f"import sys; sys.modules.update({blocked!r}); from {package}.cli import main; "
    return run_python("-c", code + "sys.exit(main())", *words, cwd=cwd)


def run_here(words: Sequence[str | Path], capsys: Capture) -> Outcome:
    """Runs ``aftexport`` in this process, with the warnings a process would show."""
    capsys.readouterr()
    with warnings.catch_warnings(), within(120):
        warnings.simplefilter("default")
        try:
            code: int | str | None = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def assert_refused(outcome: Outcome, *mentioned: str) -> None:
    """Exit status 2, one problem, one remedy, no traceback."""
    assert "Traceback" not in outcome.err + outcome.out
    assert outcome.code == 2, outcome
    lines = outcome.err[outcome.err.index("error: ") :].rstrip("\n").split("\n")
    assert lines[0] != "error: "
    assert len(lines) >= 2, outcome.err
    assert lines[-1].startswith("  ")
    assert lines[-1].strip().endswith((".", "]'"))
    for text in mentioned:
        assert text in outcome.err


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails where the block takes longer, also inside a regular expression."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    # Again and again: an exception raised while an object is destroyed is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def listing(folder: Path) -> dict[str, str]:
    """Every file and folder below, hidden ones too, with what is in them."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if "__pycache__" not in path.parts
    }


def _content(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if path.is_dir():
        return "folder"
    return hashlib.sha256(path.read_bytes()).hexdigest()
