"""Unix sockets on which a server listens, and their paths."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aftexport.errors import UsageError

try:
    import fcntl
except ImportError:  # Windows, where Python lacks Unix sockets too
    fcntl = None  # type: ignore[assignment]

_MODE = 0o666
"""Permissions of a socket, as in uvicorn: those of its folder decide who may connect."""
_FAMILY: int | None = getattr(socket, "AF_UNIX", None)
_LOCK_SECONDS = 5.0
"""Maximum wait for the lock of a folder, which a server holds for a moment."""
_POLL_SECONDS = 0.01


class UnixListener(socket.socket):
    """A Unix socket that knows the file of its path.

    Attributes:
        file: device and number of the file; None before it is bound.
    """

    file: tuple[int, int] | None = None

    def bind_path(self, path: Path) -> None:
        """Bind the socket to a path, for every user who may enter the folder."""
        self.bind(str(path))
        self.file = _file_of(path)
        path.chmod(_MODE)

    def remove_path(self) -> None:
        """Remove the path, unless another process has removed or replaced it."""
        path = Path(self.getsockname())
        with suppress(FileNotFoundError):
            if self.file is not None and _file_of(path) == self.file:
                path.unlink()


def bind_unix(path: Path, backlog: int) -> UnixListener:
    """Listen at a path. A socket that a dead process left is replaced.

    Args:
        path: the path.
        backlog: maximum number of connections that wait to be accepted.

    Raises:
        UsageError: if another process listens at the path, or it cannot be bound.
    """
    with _bound(path) as listener:
        # Within the lock: another server takes a socket that does not listen for a dead one.
        listener.listen(backlog)
        return listener


def check_unix(path: Path) -> None:
    """Check that a server can listen at a path, and leave no socket there.

    Raises:
        UsageError: if another process listens at the path, or it cannot be bound.
    """
    with _bound(path) as listener, listener:
        listener.remove_path()


@contextmanager
def _bound(path: Path) -> Iterator[UnixListener]:
    """Yield a bound socket while no other server binds a path in the folder."""
    if _FAMILY is None:
        raise UsageError(
            f"--uds {path}: this system has no Unix sockets.", "Use --host and --port."
        )
    listener = UnixListener(_FAMILY, socket.SOCK_STREAM)
    try:
        with _locked(path.parent):
            if path.is_socket() and not _has_listener(path):
                path.unlink()
            listener.bind_path(path)
            yield listener
    except OSError as error:
        listener.close()
        raise UsageError(
            f"--uds {path}: the server cannot listen there ({error.strerror or error}).",
            "Name a path without a file, in a folder that the server's user may read and write.",
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases however the process ends."""
    end = time.monotonic() + _LOCK_SECONDS
    opened = os.open(folder, os.O_RDONLY)
    try:
        while not _is_locked(opened):
            if time.monotonic() > end:
                raise OSError(errno.EWOULDBLOCK, "another process keeps the folder locked")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(opened)


def _is_locked(opened: int) -> bool:
    """Try to lock an open folder, and return whether it is locked."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_of(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino


def _has_listener(path: Path) -> bool:
    """Return whether a process listens at a Unix socket."""
    assert _FAMILY is not None
    with socket.socket(_FAMILY, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its queue is full, or this user may not connect
            return True
    return True
