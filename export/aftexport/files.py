"""Writing that never leaves half a file, or half a folder, in place of a good one."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields a path beside ``path`` to write to; moves it into place if the block succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        umask = os.umask(0)
        os.umask(umask)
        aside.chmod(0o666 & ~umask)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def aside_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder beside ``path``; whatever is left in it at the end is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield aside
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def move_into_place(aside: Path, path: Path) -> None:
    """Moves a finished folder to ``path``; what stood there goes only once the new one is whole."""
    aside.chmod(0o755)
    if not path.exists():
        aside.rename(path)
        return
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
