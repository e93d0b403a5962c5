"""The demo's commands of the tutorial, which take minutes: they are parsed."""

import shlex
from pathlib import Path

import pytest

from aftexport import demo
from aftexport.cli.demo import run
from docs.pages import BLOCKS

COMMANDS = [
    shlex.split(line, comments=True)
    for block in BLOCKS
    if block.page == "docs/tutorial.md"
    for line in block.text.splitlines()
    if line.startswith("aftexport demo ")
]


def test_tutorial_commands_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = list[demo.DemoOptions]()
    monkeypatch.setattr(demo, "run", lambda options, _: shown.append(options))
    assert [run(words[2:]) for words in COMMANDS] == [0] * len(COMMANDS)
    assert {options.mechanism for options in shown} == {"aft_local", "gated_delta_net"}
    assert {options.data for options in shown} == {None, Path("documents.csv")}
