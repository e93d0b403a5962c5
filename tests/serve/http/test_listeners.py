"""The sockets on which a server listens, for host names and addresses of both families."""

import socket
from contextlib import ExitStack

import pytest

from aftexport.errors import UsageError
from aftserve.http.listeners import bind, listen, urls


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
