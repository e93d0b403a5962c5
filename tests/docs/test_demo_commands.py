"""The demo's commands of the tutorial, which take minutes: one runs, the others are parsed."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment
from sampling import RUN_ALL

from aftexport import demo
from aftexport.cli.demo import TASKS, run
from docs.pages import BLOCKS

COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    if block.page == "docs/tutorial.md"
    for line in block.text.splitlines()
    if line.startswith("aftexport demo ")
]
SERIES = ["aftexport", "demo", "--task", "series"]


def test_tutorial_shows_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[demo.DemoOptions]()
    monkeypatch.setattr(demo, "run", lambda options, _: shown.append(options))
    assert [run(words[2:]) for words in COMMANDS] == [0] * len(COMMANDS)
    assert {options.task for options in shown} == {*TASKS}
    assert SERIES in COMMANDS


@pytest.mark.skipif(not RUN_ALL, reason="it takes minutes; set AFT_TEST_ALL=1")
def test_series_of_tutorial_reach_an_answer(tmp_path: Path) -> None:
    """The model finds the machine more often than the baseline, and no tokenizer is needed."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        SERIES,
        cwd=tmp_path,
        env=environment(PATH=programs, COLUMNS="160"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line.strip().split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    shares = {
        name: float(next(word for word in rows[name] if word.endswith("%")).rstrip("%"))
        for name in ("aft_local", "logistic regression on means and deviations")
    }
    assert shares["aft_local"] > 80, done.stdout
    assert shares["logistic regression on means and deviations"] < 50, done.stdout
    assert "within" in done.stdout
    assert "(right)" in done.stdout
    assert (tmp_path / "build" / "demo" / "series.npy").is_file()
