"""The memory limit of a container, and the warning if a document may exceed it."""

from pathlib import Path

import pytest
from memory import MIB, NEEDS_PROC, resident_mib
from rich.console import Console

from aftserve.observability import container_memory
from aftserve.server import load
from aftserve.settings import Settings


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
    monkeypatch.setattr(container_memory, "_LIMITS", (str(tmp_path / "none"), str(limit)))
    room = container_memory.memory_room()
    assert (room is None) == (left is None)
    load(Settings.read([str(bundle_folder), "--threads", "1"]), Console(quiet=True))
    assert ("--memory-budget-mib" in caplog.text) == (left == 100)


@NEEDS_PROC
def test_process_over_limit_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{MIB}\n")
    monkeypatch.setattr(container_memory, "_LIMITS", (str(limit),))
    assert container_memory.memory_room() == 0
