"""The end of a server whose engine still runs."""

from pathlib import Path

from commands import run_python

_RUNNING = """
import asyncio, atexit, threading
from aftexport.system.process import end_process
from aftserve import server
from aftserve.cli import main
from aftserve.scheduling.engine_thread import EngineThread

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
