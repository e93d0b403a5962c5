"""Writing that never leaves half a file, or half a folder, in place of a good one."""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields a path beside ``path`` to write to; moves it into place if the block succeeds.

    A device or a pipe, such as ``/dev/stdout``, is not replaced: it is yielded itself. Of a link,
    what it leads to is replaced.
    """
    if is_device(path):
        yield path
        return
    path = path.resolve()
    with _parents(path):
        aside = _beside(path)
        aside.touch(exist_ok=False)
        try:
            yield aside
            if path.exists():
                _write_through(aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


def _write_through(file: Path) -> None:
    """Has the system write a file out, or a power failure could lose the new and the old one."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def is_device(path: Path) -> bool:
    """Tells whether something is there that is neither file nor folder."""
    return path.exists() and not (path.is_file() or path.is_dir())


@contextmanager
def aside_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``path``; whatever is left in it at the end is removed."""
    with _parents(path):
        aside = _beside(path)
        aside.mkdir()
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Makes the folders above ``path``; those it made go again if nothing came into them."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


def _beside(path: Path) -> Path:
    """A name that nothing has, for something new with the rights of anything new.

    ``tempfile`` gives rights to the owner alone, and what others have can only be learnt by
    setting the mask of the process, for all its threads.
    """
    return path.parent / f".{path.name[:32]}.{secrets.token_hex(8)}"


def move_into_place(aside: Path, path: Path) -> None:
    """Moves a finished folder to ``path``; what stood there goes only once the new one is whole."""
    if not path.exists():
        aside.rename(path)
        return
    for file in aside.rglob("*"):
        if file.is_file():
            _write_through(file)
    with aside_folder(path) as old:
        path.rename(old / "replaced")
        try:
            aside.rename(path)
        except OSError:
            (old / "replaced").rename(path)
            raise


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(content: bytes) -> str:
    """Hex digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Writes JSON whose bytes depend on the content alone."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False, default=_plain)
    # The name of a file may have bytes that are no UTF-8; replaced so, they are escapes of JSON.
    path.write_text(text + "\n", "utf-8", "backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")
