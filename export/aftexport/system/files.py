"""Atomic replacement of files and folders, JSON files of models, and archives without compression.

A failure never leaves half of a new file or folder.
"""

import hashlib
import json
import os
import secrets
import shutil
import sys
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from aftexport.errors import CheckpointError


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to, and move it into place if the block succeeds.

    A device or a pipe, such as ``/dev/stdout``, is not replaced: it is yielded itself. For a link,
    its target is replaced.
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
    """Flush a file to disk: otherwise a power failure could lose both the new and the old file."""
    mode = "r+b" if sys.platform == "win32" else "rb"  # Windows flushes only files open for writing
    with file.open(mode) as opened:
        os.fsync(opened.fileno())


def is_device(path: Path) -> bool:
    """Return whether a path exists and is neither a file nor a folder."""
    return path.exists() and not (path.is_file() or path.is_dir())


@contextmanager
def aside_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``path``, and remove it with its contents at the end."""
    with _parents(path):
        aside = _beside(path)
        aside.mkdir()
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """Make the folders above ``path``, and remove new folders that stay empty."""
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for parent in missing:
            with suppress(OSError):
                parent.rmdir()


def _beside(path: Path) -> Path:
    """Return an unused name, for a new file or folder with the usual permissions.

    ``tempfile`` gives permissions only to the owner. The usual permissions can be read only by
    setting the mask of the process, which affects all its threads.
    """
    return path.parent / f".{path.name[:32]}.{secrets.token_hex(8)}"


def move_into_place(aside: Path, path: Path) -> None:
    """Move a complete folder to ``path``, and only then remove the old one."""
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
    """Return the hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of(content: bytes) -> str:
    """Return the hex digest of bytes."""
    return hashlib.sha256(content).hexdigest()


def write_json(path: Path, content: Any, *, ordered: Collection[str] = ()) -> None:
    """Write JSON whose bytes depend only on the content.

    Keys are sorted, but not in the mappings under the keys ``ordered``.
    """
    content = _sorted(content, ordered)
    text = json.dumps(content, indent=2, ensure_ascii=False, default=_plain)
    # File names may have bytes that are not UTF-8; backslashreplace turns them into JSON escapes.
    path.write_text(text + "\n", "utf-8", "backslashreplace")


def _sorted(value: Any, ordered: Collection[str] = ()) -> Any:
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: {name: _sorted(inner) for name, inner in value[key].items()}
        if key in ordered and isinstance(value[key], dict)
        else _sorted(value[key])
        for key in sorted(value)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


MAX_JSON_BYTES = 1 << 24
"""The maximum size of a file. The tokenizer's settings of a model can take more than 1 MB."""
MAX_SETTINGS_BYTES = 1 << 20
"""The maximum size of a file with a few settings."""


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file.

    Raises:
        CheckpointError: if the file is larger, or not valid JSON.
        OSError: if the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise CheckpointError(
            path,
            f"expected at most {max_bytes} bytes of JSON, got more",
            "Give the file as the library saved it.",
        )
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, f"not valid JSON ({error})", "Fix the file.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; see ``read_json``."""
    content = read_json(path)
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise CheckpointError(path, f"expected a JSON object, got {kind}", "Fix the file.")
    return content


_ENCRYPTED = 1


def unstored_member(archive: zipfile.ZipFile, size: int) -> str | None:
    """Return why an archive of ``size`` bytes could need more memory than that, or None."""
    names, total = set[str](), 0
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            return f"{member.filename} in it is compressed"
        if member.file_size != member.compress_size:
            return (
                f"{member.filename} in it must be stored in {member.file_size} bytes, got "
                f"{member.compress_size}"
            )
        if member.filename in names:
            return f"{member.filename} is in it twice"
        names.add(member.filename)
        total += member.file_size
        if total > size:
            return f"it has {size} bytes, and its members up to {member.filename} have {total}"
    return None
