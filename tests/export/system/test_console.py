"""A stage that takes long prints its progress."""

import io
import time

import pytest
from clocks import replace_time
from rich.console import Console

from aftexport.system import console as our_console


def shown(seconds: list[float], monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> str:
    """Return the output of a stage with progress at these times after its start."""
    now = 0.0
    replace_time(monkeypatch, our_console, perf_counter=lambda: now)
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    with our_console.stage(console, "Examining [b].onnx") as progress:
        for now in seconds:
            progress(int(now), 1200, "nodes read")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_short_stage_prints_only_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown([0.1, 1.9], monkeypatch, terminal=False) == "done Examining [b].onnx 1.9 s\n"


def test_long_stage_without_terminal_prints_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown([1.0, 3.0, 4.0, 12.9, 13.5, 1100.0], monkeypatch, terminal=False).splitlines()
    assert lines[:-1] == [
        f"Examining [b].onnx ... {done} of 1,200 nodes read" for done in ("3", "13", "1,100")
    ]


def test_silent_stage_prints_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(our_console, "_SILENT_SECONDS", 0.01)
    console = Console(file=(file := io.StringIO()), force_terminal=False, color_system=None)
    with our_console.stage(console, "Tracing to ONNX"):
        while "Tracing" not in file.getvalue():
            time.sleep(0.01)
    first, last = file.getvalue().splitlines()
    assert first == "Tracing to ONNX ... 0 s"
    assert last.startswith("done Tracing to ONNX ")


def test_long_stage_in_terminal_updates_line(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[str] = []
    monkeypatch.setattr("rich.status.Status.update", lambda _, text: updates.append(text))
    shown([1.0, 2.5, 3.0], monkeypatch, terminal=True)
    assert updates == [
        rf"Examining \[b].onnx ... {done} of 1,200 nodes read" for done in ("2", "3")
    ]
