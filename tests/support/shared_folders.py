"""Folders that one worker of xdist makes for all workers of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a read-only folder of this run, made by the first worker that needs it.

    Args:
        factory: pytest's factory of temporary folders.
        name: name of the folder.
        make: a function that fills the empty folder.
    """
    own = factory.getbasetemp()
    root = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, draft = root / "shared" / name, root / "drafts" / name
    with FileLock(root / f"{name}.lock"):
        if not folder.is_dir():
            shutil.rmtree(draft, ignore_errors=True)  # of a worker that failed
            draft.mkdir(parents=True)
            make(draft)
            folder.parent.mkdir(exist_ok=True)
            draft.rename(folder)
    return folder
