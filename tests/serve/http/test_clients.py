"""The clients among which the server shares its queue and its buffers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aftserve.grpc.addresses import peer_host
from aftserve.http.clients import SharedBytes, client_at


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", "unix"),
        ("testclient", "testclient"),
    ],
)
def test_client_has_name_of_network(host: str, name: str) -> None:
    assert client_at(host).name == name


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.7:50051", "192.0.2.7"),
        ("ipv6:%5B2001:db8::1%5D:50051", "2001:db8::1"),
        ("ipv6:[::1]:50051", "::1"),
        ("unix:", ""),
        ("unix:/run/x:1", ""),
    ],
)
def test_grpc_peer_has_address(peer: str, host: str) -> None:
    assert peer_host(peer) == host


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), max_size=60))
def test_buffer_has_room_for_newcomers(requests: list[tuple[str, int]]) -> None:
    """Each request holds its bytes at once; whatever is admitted, the sum is bounded."""
    buffer, held = SharedBytes(100), list[tuple[str, int]]()
    for client, count in requests:
        if buffer.has_room(client, count):
            buffer.add(client, count)
            held.append((client, count))
        others = sum(size for name, size in held if name == client)
        assert buffer.held == sum(size for _, size in held) <= 100
        if len([name for name, _ in held if name == client]) > 1:
            assert others <= 100 - buffer.held or others <= 60 + 60
    for client, count in held:
        buffer.add(client, -count)
    assert buffer.held == 0
    assert not buffer._held_by


def test_greedy_client_leaves_third_of_room() -> None:
    buffer = SharedBytes(90)
    for client in ("a", "b", "c"):
        while buffer.has_room(client, 1):
            buffer.add(client, 1)
    assert [buffer._held_by[client] for client in ("a", "b", "c")] == [45, 22, 11]
    assert buffer.has_room("d", 12)
    assert not buffer.has_room("d", 13)
