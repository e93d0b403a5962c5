"""Timeouts of a connection: for headers, bodies, idle clients and unread answers."""

import gc
import itertools
import json
import socket
import struct
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
from clients import GET, eventually, head, raw_connection, refusal, response
from servers import Serve, address_of, no_content, running, serving

_RESUMED_BYTES = 16 * 1024
"""The size of the rest of an answer at which asyncio resumes the application."""


@pytest.fixture(scope="module")
def address(bundle_folder: Path, serve: Serve) -> str:
    return serve(bundle_folder, "--receive-seconds", "5")


@pytest.mark.parametrize(
    "start",
    [b"", b"POST /infer HT", b"GET /readyz HTTP/1.1\r\nHost: x\r\n"],
    ids=["nothing", "first line", "host"],
)
def test_incomplete_headers_get_408(start: bytes, address: str) -> None:
    status, problem = refusal(address, start)
    assert status == 408
    assert "5 s" in problem


@pytest.mark.parametrize(
    "extra", [(), ("Connection: upgrade", "Upgrade: h2c")], ids=["plain", "upgrade"]
)
def test_body_timeout_starts_with_headers(extra: tuple[str, ...], address: str) -> None:
    start, end = head(100, *extra)[:-2], head(100, *extra)[-2:]
    with raw_connection(address) as connection:
        started = time.monotonic()
        connection.sendall(start)
        time.sleep(3)
        connection.sendall(end + b'{"text":')
        status, body = response(connection)
        taken = time.monotonic() - started
    assert status == 408
    assert "The request did not arrive within 5 s" in json.loads(body)["detail"]
    assert taken < 8  # a timeout from the end of the headers would end after 8


@pytest.mark.parametrize("ahead", [b"", GET[:10]], ids=["later", "pipelined"])
def test_kept_connection_has_header_timeout(ahead: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET + ahead)
        assert response(connection)[0] == 200
        if not ahead:
            connection.sendall(GET[:10])
        assert response(connection)[0] == 408


def test_idle_connection_outlives_request_timeout() -> None:
    with (
        running(no_content, seconds=1, timeout_keep_alive=60) as server,
        raw_connection(address_of(server)) as connection,
    ):
        for pause in (1.5, 0):
            connection.sendall(GET)
            assert response(connection)[0] == 204
            time.sleep(pause)


def test_keep_alive_setting_is_obeyed(bundle_folder: Path, tmp_path: Path) -> None:
    options = ("--keep-alive-seconds", "1")
    with (
        serving(bundle_folder, tmp_path / "log", *options) as (address, _),
        raw_connection(address) as connection,
    ):
        connection.sendall(GET)
        assert response(connection)[0] == 200
        assert connection.recv(1) == b""


def test_client_that_reads_nothing_is_disconnected(address: str) -> None:
    requests = GET.replace(b"/healthz", b"/openapi.json") * 1_000_000
    with raw_connection(address) as connection, pytest.raises(ConnectionError):
        connection.sendall(requests)


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
def test_unread_last_answer_ends_connection(last: bytes) -> None:
    answered = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal answered
        length = (b"content-length", b"30000")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"a" * 30_000})
        answered += 1

    def unsent() -> int:
        return max(c.transport.get_write_buffer_size() for c in server.server_state.connections)  # type: ignore[union-attr]

    with running(app, seconds=1, timeout_keep_alive=1) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.servers[0].sockets[0].getsockname())
        for count in itertools.count(1):
            connection.sendall(GET)
            eventually(lambda: answered == count, "the request is answered")  # noqa: B023
            time.sleep(0.01)
            if unsent():
                break
        connection.sendall(GET[:-2] + last + b"\r\n")
        eventually(lambda: not server.server_state.connections, "the connection ends")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_last_answer_read_in_part_ends_connection(loop: str) -> None:
    """A client that stops within the last bytes of its last answer is disconnected too."""
    length = 1_000_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % length), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"a" * length})

    def unsent() -> int:
        return max(
            (c.transport.get_write_buffer_size() for c in server.server_state.connections),  # type: ignore[union-attr]
            default=0,
        )

    with running(app, 1, loop=loop) as server:
        listener = server.servers[0].sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(20):  # the system may take the whole rest at once
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(listener.getsockname())
                connection.sendall(GET)
                eventually(lambda: unsent() > 0, "the answer is in the buffer")
                while unsent() > _RESUMED_BYTES:
                    assert connection.recv(1024)
                has_rest = unsent() > 0
                if has_rest:
                    eventually(lambda: not server.server_state.connections, "the connection ends")
                    break
            eventually(lambda: not server.server_state.connections, "the connection is closed")
        assert has_rest, "the client was too fast to leave a rest"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_reset_connection_is_freed(loop: str) -> None:
    """A timer of a connection that a client has reset would keep its memory."""

    def is_free() -> bool:
        gc.collect()
        return connection() is None

    with running(no_content, 3600, loop=loop, timeout_keep_alive=3600) as server:
        with raw_connection(address_of(server)) as client:
            client.sendall(GET)
            assert response(client)[0] == 204
            (one,) = server.server_state.connections
            connection = weakref.ref(one)
            del one
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(is_free, "the connection is freed")
