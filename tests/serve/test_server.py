"""The memory of a server's container, and the end of a server whose engine still runs."""

from pathlib import Path

import pytest
from commands import run_python
from memory import MIB, NEEDS_PROC, resident_mib
from rich.console import Console

from aftserve import server
from aftserve.server import load
from aftserve.settings import Settings

_RUNNING = """
import asyncio, atexit, threading
from aftexport.system.process import end_process
from aftserve import server
from aftserve.cli import main
from aftserve.scheduling.scheduler import EngineThread

async def begin():
    EngineThread(threading.Event().wait, None, None)

server.Server.run = lambda self: asyncio.run(begin())
atexit.register(print, "exit functions")
end_process(main)
"""


def test_running_engine_skips_exit_functions(bundle_folder: Path, tmp_path: Path) -> None:
    """The exit functions of ONNX Runtime abort a process in which a thread runs a model."""
    outcome = run_python("-c", _RUNNING, bundle_folder, "--port", "0", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "Engine:" in outcome.out
    assert "exit functions" not in outcome.out


@NEEDS_PROC
@pytest.mark.parametrize("left", [100, 2000, None])
def test_small_container_memory_is_logged(
    left: int | None,
    bundle_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("max\n" if left is None else f"{int((resident_mib() + left) * MIB)}\n")
    monkeypatch.setattr(server, "_MEMORY_LIMITS", (str(tmp_path / "none"), str(limit)))
    room = server.memory_room()
    assert (room is None) == (left is None)
    load(Settings.read([str(bundle_folder), "--threads", "1"]), Console(quiet=True))
    assert ("--memory-budget-mib" in caplog.text) == (left == 100)


@NEEDS_PROC
def test_process_over_limit_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{MIB}\n")
    monkeypatch.setattr(server, "_MEMORY_LIMITS", (str(limit),))
    assert server.memory_room() == 0
