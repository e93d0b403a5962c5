"""A server: its memory limit, what the garbage collector leaves out, and its end."""

import asyncio
import gc
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_swaps import load_models
from commands import run_python
from memory import MIB, NEEDS_PROC, resident_mib
from rich.console import Console

import aftplugins
from aftserve import server
from aftserve.app import create_app
from aftserve.model.classifier import Classifier
from aftserve.server import load
from aftserve.settings import Settings

_COUNTED = """
import gc, sys
from aftserve import server
from aftserve.cli import main

def run(self):
    gc.collect()
    tracked = gc.get_objects()
    found = [one for one in (self.config.app, self._models) if any(one is t for t in tracked)]
    print("tracked", len(found))

server.Server.run = run
sys.exit(main())
"""


def test_server_freezes_application(bundle_folder: Path, tmp_path: Path) -> None:
    outcome = run_python("-c", _COUNTED, bundle_folder, "--port", "0", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert "tracked 0" in outcome.out


def test_load_says_why_nothing_is_fused(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for switch, expected in (("0", 0), ("1", 1)):
        monkeypatch.setenv(aftplugins.DISABLE_VARIABLE, switch)
        console = Console(record=True, width=200)
        load(Settings.read([str(bundle_folder), "--threads", "1"]), console)
        assert console.export_text().count("The fused kernels are switched off") == expected


@pytest.fixture
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.slow
def test_unload_releases_frozen_model(bundle_folder: Path, tmp_path: Path, thaw: None) -> None:
    """A frozen cycle of objects would keep the memory of a model."""
    folder = tmp_path / "bundles"
    for name in ("a.bundle", "b.bundle"):
        shutil.copytree(bundle_folder, folder / name)

    async def scenario() -> None:
        models = load_models(folder)
        create_app(models)
        gc.collect()
        gc.freeze()
        old: weakref.ref[Classifier] = weakref.ref(models.named("a").model.classifier)
        async with models.running():
            ids = [1, 2, 3]
            await models.named("a").classify([ids], time.monotonic() + 60)
            await models.unload("a")
            while old() is not None:  # the engine's thread may hold the last run
                gc.collect()
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 60))


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
