"""What a run that was killed leaves beside its output: the next one of that output removes it."""

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from aftexport.files import is_device, replacing_file

try:
    import fcntl
except ImportError:  # Windows has no such locks: nothing is removed there
    fcntl = None  # type: ignore[assignment]

_LONGEST_NAME = 32
"""Of a longer one the file beside it has the beginning alone, as that of another output may."""


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Like ``replacing_file``, without what killed runs of the same output have left.

    Whoever writes has its file locked until that is in its place. The system takes the lock back
    however a process ends, so that what nobody has locked is nobody's. Where a file system has no
    locks, nothing is removed.
    """
    if fcntl is None or is_device(out):
        with replacing_file(out) as aside:
            yield aside
        return
    _remove_leftovers(out.resolve())
    with ExitStack() as kept, replacing_file(out) as aside:
        kept.enter_context(_locked(aside))
        yield aside


def _locked(file: Path) -> BinaryIO:
    """Locks a file as long as what is returned is open.

    Between its making and its lock another run may have removed it; then it is made again.
    """
    while True:
        opened = file.open("ab")
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        if os.fstat(opened.fileno()).st_nlink:
            return opened
        opened.close()


def _remove_leftovers(out: Path) -> None:
    if len(out.name) > _LONGEST_NAME:
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
