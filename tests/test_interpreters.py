"""The search for the Python interpreters of this machine."""

import os
from pathlib import Path

import pytest
from interpreters import InterpreterError, find_python, interpreters


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders on PATH, the first with a shim of pyenv that has no version behind it."""
    write_program(tmp_path / "shims" / "python3.13", "exit 127")
    monkeypatch.setenv("PATH", os.pathsep.join(map(str, (tmp_path / "shims", tmp_path / "bin"))))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr("sys._base_executable", write_program(tmp_path / "base" / "p", "echo 3.11"))
    return tmp_path


def test_shim_without_version_is_passed_over(folder: Path) -> None:
    with pytest.raises(InterpreterError, match=r"Expected a Python 3\.13 .* got none that runs"):
        find_python("3.13")
    program = write_program(folder / "bin" / "python3.13", "echo 3.13")
    assert find_python("3.13") == program
    program = write_program(folder / "pyenv/versions/3.13.1/bin/python", "echo 3.13")
    assert find_python("3.13") == program


def test_interpreters_are_those_asked_for(folder: Path) -> None:
    assert interpreters() == {"3.11": folder / "base" / "p"}
    assert interpreters(["3.11"]) == interpreters()
    with pytest.raises(InterpreterError, match=r"Python 3\.12"):
        interpreters(["3.11", "3.12"])
    with pytest.raises(InterpreterError, match=r"got 3\.10"):
        interpreters(["3.10"])
