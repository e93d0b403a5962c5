"""The addresses that gRPC binds are those of HTTP, as far as gRPC can."""

import socket

import pytest

from aftexport.errors import UsageError
from aftserve.grpc.addresses import close_connection, free_addresses

needs_both = pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="needs sockets of both IPv4 and IPv6"
)


@pytest.mark.parametrize("hosts", [["127.0.0.1"], ["127.0.0.1", "127.0.0.1"], ["0.0.0.0"]])
def test_hosts_have_one_address(hosts: list[str]) -> None:
    (address,) = free_addresses(hosts, 0)
    host, _, port = address.rpartition(":")
    assert host == hosts[0]
    assert int(port) > 0


@needs_both
@pytest.mark.parametrize("hosts", [["::"], ["0.0.0.0", "::"], ["::", "0.0.0.0"]])
def test_every_address_has_one_address(hosts: list[str]) -> None:
    (address,) = free_addresses(hosts, 0)
    assert address.startswith("[::]:")


@needs_both
def test_narrow_ipv4_beside_every_ipv6_is_refused() -> None:
    with pytest.raises(UsageError, match=r"got a --host for 127\.0\.0\.1 beside it") as raised:
        free_addresses(["::", "127.0.0.1"], 0)
    assert raised.value.remedy == "Choose --host ::, or only addresses of this machine."


def test_taken_port_names_option() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match=r"^gRPC: ") as raised,
    ):
        free_addresses(["127.0.0.1"], taken.getsockname()[1])
    assert raised.value.remedy == "Choose another address by --host and --grpc-port."


@needs_both
@pytest.mark.parametrize(
    ("listen", "host", "peer"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1"),
        ("::", "127.0.0.1", "ipv4:127.0.0.1"),  # its address has the form ::ffff:127.0.0.1
        ("::", "::1", "ipv6:%5B::1%5D"),
    ],
)
def test_close_ends_only_named_client(listen: str, host: str, peer: str) -> None:
    family = socket.AF_INET6 if listen == "::" else socket.AF_INET
    with (
        socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as listener,
        socket.create_connection((host, listener.getsockname()[1]), timeout=60) as named,
        socket.create_connection((host, listener.getsockname()[1]), timeout=60) as other,
    ):
        port = listener.getsockname()[1]
        (first, _), (second, _) = listener.accept(), listener.accept()
        with first, second:
            close_connection(f"{peer}:{named.getsockname()[1]}", port + 1)
            first.sendall(b"open")
            assert named.recv(4) == b"open"
            close_connection(f"{peer}:{named.getsockname()[1]}", port)
            assert named.recv(1) == b""
            second.sendall(b"open")
            assert other.recv(4) == b"open"
