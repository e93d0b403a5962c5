"""The file of an output, which is complete or not written."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from aftexport.bundle.output_path import check_can_be_made
from aftexport.errors import AftexportError, UsageError
from aftexport.system.files import is_device, replacing_file

try:
    import fcntl
except ImportError:  # Windows has no such locks: nothing is removed there
    fcntl = None  # type: ignore[assignment]

_MAX_NAME_CHARACTERS = 32
"""Maximum length of an output's name. The temporary file of a longer name has only its start, which
other outputs may share."""
_REMEDIES = {
    errno.EDQUOT: "make room there, or name another place",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or name another place",
    errno.ENOSPC: "make room there, or name another place",
}


class OutputError(AftexportError):
    """The output cannot be written; an earlier file is unchanged."""

    # The system's own text may name a temporary file.

    exit_code = 1

    def __init__(self, place: str, error: OSError) -> None:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check the place, or name another")
        super().__init__(
            f"{place} cannot be written ({reason}).", f"The output was not completed: {remedy}."
        )


def check_output(path: Path, places: Sequence[Path], suffixes: Sequence[str]) -> None:
    """Check that an output has a known format, can be made, and is not part of the input."""
    if path.suffix not in suffixes:
        raise UsageError(f"--output must end in {' or '.join(suffixes)}, got {path}.", "Rename it.")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder.", "Name a file in it.")
    if any(path.resolve().is_relative_to(place.resolve()) for place in places):
        raise UsageError(f"--output {path} lies in the input.", "Name another place.")
    check_can_be_made("--output", path)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Do the same as ``replacing_file``, and remove files of killed runs to the same output."""
    # A run locks its file until the file is in its place. The system releases the lock however the
    # process ends, so an unlocked file has no owner. If the file system has no locks, nothing is
    # removed.
    if fcntl is None or is_device(out):
        with replacing_file(out) as aside:
            yield aside
        return
    _remove_leftovers(out.resolve())
    with ExitStack() as kept, replacing_file(out) as aside:
        kept.enter_context(_locked(aside))
        yield aside


def _locked(file: Path) -> BinaryIO:
    """Lock a file for as long as the returned file is open."""
    # Another run may remove the file before it is locked; then it is made again.
    while True:
        opened = file.open("ab")
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        if os.fstat(opened.fileno()).st_nlink:
            return opened
        opened.close()


def _remove_leftovers(out: Path) -> None:
    if len(out.name) > _MAX_NAME_CHARACTERS:
        return
    beside = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{16}}")
    with suppress(OSError):
        for file in out.parent.iterdir():
            if beside.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                _remove_unless_locked(file)


def _remove_unless_locked(file: Path) -> None:
    # It may be locked, or another user's, or removed by another run.
    with suppress(OSError), file.open("r+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink()
