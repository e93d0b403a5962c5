"""The sockets on which a server listens: host names, addresses and paths."""

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from aftexport.errors import UsageError
from aftserve.http.listeners import (
    UnixListener,
    bind,
    bind_unix,
    check_unix,
    close_all,
    listen,
    urls,
)


def families(*hosts: str) -> list[str]:
    """Return the loopback addresses that reach the sockets of some hosts."""
    reached = list[str]()
    with ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in bind(hosts, 0)]
        for listener in listeners:
            listener.listen()
        (port,) = {listener.getsockname()[1] for listener in listeners}
        for place in ("127.0.0.1", "::1"):
            try:
                socket.create_connection((place, port)).close()
            except ConnectionRefusedError:
                continue
            reached.append(place)
        assert len(urls(listeners)) == len(reached)
        assert all(f":{port}" in url for url in urls(listeners))
    return reached


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has no IPv6")
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("::", ["127.0.0.1", "::1"]),
        (":: 127.0.0.1", ["127.0.0.1", "::1"]),
        ("127.0.0.1 ::1", ["127.0.0.1", "::1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("127.0.0.1 127.0.0.1 0.0.0.0", ["127.0.0.1"]),
        ("::1 :: ::1", ["127.0.0.1", "::1"]),
        ("::1", ["::1"]),
    ],
)
def test_host_binds_expected_families(host: str, expected: list[str]) -> None:
    assert families(*host.split()) == expected


def test_host_name_binds_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),  # another machine
    ])  # fmt: skip
    first, second = bind(["localhost"], 0)
    with first, second:
        assert first.getsockname() == ("127.0.0.1", second.getsockname()[1])
        assert second.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_port_in_use_is_refused(host: str) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match=rf"listen at {host}, port \d+ \(.*in use"),
    ):
        bind([host], taken.getsockname()[1])


@pytest.mark.parametrize("host", ["192.0.2.1", "absent.invalid", "a..b"])
def test_unavailable_host_is_named(host: str) -> None:
    """The other hosts are available; an address of a documentation network is not."""
    with pytest.raises(UsageError, match=rf"cannot listen at {host}, port \d+ "):
        bind(["127.0.0.1", host], 0)


def test_hosts_share_common_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose address of IPv6 is another machine's is reached by the address of a host."""
    found = {
        "localhost": [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
        ],
        "127.0.0.1": [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))],
    }
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: found[host])
    for hosts in (["127.0.0.1", "localhost"], ["localhost", "127.0.0.1"]):
        (listener,) = bind(hosts, 0)
        with listener:
            assert listener.getsockname()[0] == "127.0.0.1"


def test_address_taken_after_bind_is_named() -> None:
    (first,) = bind(["127.0.0.1"], 0)
    with first:
        (second,) = bind(["127.0.0.1"], first.getsockname()[1])
        with second:
            listen([first], 1)
            with pytest.raises(UsageError, match=r"listen at 127.0.0.1, port \d+ \(.*in use"):
                listen([second], 1)


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
