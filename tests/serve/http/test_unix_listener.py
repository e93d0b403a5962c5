"""The paths of Unix sockets on which a server listens."""

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aftexport.errors import UsageError
from aftserve.http.listeners import UnixListener, bind_unix, check_unix, close_all, urls

fcntl = pytest.importorskip("fcntl", reason="the system has no Unix sockets")


def leave_stale(path: Path) -> None:
    """Leave a socket as a process that was killed does."""
    bind_unix(path, 1).close()
    assert path.is_socket()


def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    leave_stale(path)
    listener = bind_unix(path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert urls([listener]) == [f"unix:{path}"]
    close_all([listener])
    assert not path.exists()


def test_unusable_unix_path_is_refused(tmp_path: Path) -> None:
    busy, file = tmp_path / "busy", tmp_path / "file"
    file.write_text("kept")
    with bind_unix(busy, 1):
        for path in (busy, file, tmp_path / "absent" / "socket", tmp_path / ("a" * 120)):
            for refused in (lambda path: bind_unix(path, 1), check_unix):
                with pytest.raises(UsageError, match=f"--uds {path}: the server cannot listen"):
                    refused(path)
        assert busy.is_socket()
    assert file.read_text() == "kept"


def test_check_leaves_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):
        check_unix(path)
        assert not path.exists()
        leave_stale(path)


def test_path_of_another_server_stays(tmp_path: Path) -> None:
    """An operator removes the path of a server, and another server takes it."""
    path = tmp_path / "socket"
    first = bind_unix(path, 1)
    path.unlink()
    second = bind_unix(path, 1)
    close_all([first])
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    close_all([second])
    assert not path.exists()


def test_one_of_many_starts_takes_path(tmp_path: Path) -> None:
    path, starts = tmp_path / "socket", 8
    together = threading.Barrier(starts)

    def start(_: int) -> UnixListener | None:
        together.wait()
        try:
            return bind_unix(path, 1)
        except UsageError:
            return None

    with ThreadPoolExecutor(starts) as pool:
        for _ in range(20):
            leave_stale(path)
            (taken,) = filter(None, pool.map(start, range(starts)))
            taken.close()


def test_locked_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftserve.http.listeners._LOCK_SECONDS", 0.05)
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="another process keeps the folder locked"):
            bind_unix(tmp_path / "socket", 1)
    finally:
        os.close(lock)
    bind_unix(tmp_path / "socket", 1).close()
