"""The helpers of the tests: free ports, interpreters, markers, sampled tables and allowed skips."""

import itertools
import os
import socket
import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

import markers
import pytest
import sampling
import servers
import skips
from interpreters import InterpreterError, find_python, interpreters

SUPPORT = Path(__file__).parent / "support"
SAME_START = """
import os, sys

os.getpid = lambda: 7
from servers import free_port

print(*(free_port() for _ in range(5)), flush=True)
sys.stdin.read()
"""


def test_processes_of_equal_start_share_no_port() -> None:
    """The numbers of both processes begin at the same port, and both hold their ports."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAME_START],
            cwd=SUPPORT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    numbers: list[str] = []
    for process in processes:
        assert process.stdout is not None
        numbers += process.stdout.readline().split()
    for process in processes:
        process.communicate("")
    assert len(numbers) == 10
    assert len({*numbers}) == 10


def test_port_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        taken = next(port for port in range(29_000, 30_000) if is_taken_by(server, port))
        server.listen()
        monkeypatch.setattr(servers, "_numbers", itertools.count(taken - 20_000))
        assert servers.free_port() != taken


def is_taken_by(server: socket.socket, port: int) -> bool:
    try:
        server.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


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


def test_table_lists_existing_modules_and_folders() -> None:
    modules = {path.stem for path in markers.TESTS.rglob("test_*.py")}
    assert modules >= markers.BY_MODULE.keys()
    folders = {path.parent.name for path in markers.TESTS.rglob("test_*.py")}
    assert folders >= markers.BY_FOLDER.keys()


TABLE = list(product(range(20), ("float32", "float16"), (False, True)))


def describe(case: tuple[int, str, bool]) -> tuple[str, set[object]]:
    return str(case), set(enumerate(case))


def test_part_keeps_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN_ALL", False)
    part = sampling.part_of(TABLE, describe)
    assert len(part) == len(set(part)) == 20
    assert {value for case in part for value in enumerate(case)} == {
        value for case in TABLE for value in enumerate(case)
    }


def test_part_does_not_depend_on_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN_ALL", False)
    part = sampling.part_of(TABLE, describe, keep=0.4)
    assert len(part) == 32
    assert sampling.part_of(TABLE[::-1], describe, keep=0.4) == part


def test_whole_table_runs_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN_ALL", True)
    assert sampling.part_of(TABLE, describe) == TABLE
    assert sampling.fewer(30) == 30


ENTRIES = tomllib.loads(skips.LIST.read_text("utf-8"))["skip"]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["reason"])
def test_entry_is_reason_of_test(entry: dict[str, str]) -> None:
    assert entry["when"] in skips.CONDITIONS
    # A wheel's name is put before the rest of the text.
    text = entry["reason"].partition(" is not built ")[2] or entry["reason"]
    sources = Path(__file__).parent.rglob("test_*.py")
    others = (Path(__file__).with_name("conftest.py"), *sources)
    assert any(text in path.read_text("utf-8") for path in others if path != Path(__file__))


def test_reason_needs_its_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no tritonserver with the backend onnxruntime is on the PATH"
    monkeypatch.setitem(skips.CONDITIONS, "no tritonserver", lambda: True)
    assert skips.allowed(reason)
    monkeypatch.setitem(skips.CONDITIONS, "no tritonserver", lambda: False)
    assert not skips.allowed(reason)
    assert not skips.allowed("no clang++")
