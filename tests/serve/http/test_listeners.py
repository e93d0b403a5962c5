"""The sockets on which a server listens, for host names and addresses of both families."""

import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from aftexport.errors import UsageError
from aftserve.http.listeners import bind, bind_unix, close_all, urls


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


def test_stale_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    bind_unix(path).close()  # as a process that was killed leaves it
    assert path.is_socket()
    listener = bind_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert urls([listener]) == [f"unix:{path}"]
    close_all([listener])
    assert not path.exists()


def test_unusable_unix_path_is_refused(tmp_path: Path) -> None:
    busy, file = tmp_path / "busy", tmp_path / "file"
    file.write_text("kept")
    with bind_unix(busy) as listener:
        listener.listen()
        for path in (busy, file, tmp_path / "absent" / "socket", tmp_path / ("a" * 120)):
            with pytest.raises(UsageError, match=f"--uds {path}: the server cannot listen"):
                bind_unix(path)
    assert file.read_text() == "kept"
