"""Bodies that are too large, too slow, or without end."""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from clients import eventually, head, http, metric, raw_connection, response
from servers import Serve

MIB = 1 << 20
LIMITS = ("--max-body-mib", "1", "--max-buffered-mib", "2", "--receive-seconds", "5",
          "--max-characters", "5000")  # fmt: skip


@pytest.fixture(scope="module")
def address(bundle_folder: Path, serve: Serve) -> str:
    return serve(bundle_folder, *LIMITS, measured=True)


def resident_mib(address: str) -> float:
    return metric(address, "process_resident_memory_bytes") / MIB


def send_chunks(connection: socket.socket, size: int) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(size // 0x10000):
        connection.sendall(chunk)


def test_oversized_body_is_refused_before_upload(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(head(2 * MIB, "Expect: 100-continue"))
        status, body = response(connection)
    assert status == 413
    assert str(MIB) in json.loads(body)["detail"]


def test_client_reads_413_after_full_upload(address: str) -> None:
    answer = http.post(f"{address}/infer", json={"text": "a" * 20 * MIB}, timeout=30)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"


def test_chunked_body_stops_at_limit(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(head(None))
        send_chunks(connection, 2 * MIB)
        status, _ = response(connection)
    assert status == 413


def test_gigabyte_body_leaves_memory_unchanged(address: str) -> None:
    before = resident_mib(address)
    with raw_connection(address) as connection:
        connection.sendall(head(None))
        with suppress(OSError):  # the server reads for five seconds, which may not suffice
            send_chunks(connection, 1024 * MIB)
    assert resident_mib(address) - before < 8
    assert http.get(f"{address}/readyz").status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT"])
def test_body_of_refused_method_is_discarded(method: str, address: str) -> None:
    answer = http.request(method, f"{address}/readyz", content=b" " * 20 * MIB, timeout=30)
    assert answer.status_code == 405


@pytest.mark.slow
def test_slow_body_gets_408(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(head(100) + b'{"text":')
        started = time.monotonic()
        status, body = response(connection)
        assert status == 408
        assert "5 s" in json.loads(body)["detail"]
        assert connection.recv(1) == b""
    assert time.monotonic() - started < 20


@pytest.mark.slow
def test_dripping_body_gets_408(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(head(1000))
        connection.settimeout(0.2)
        status, end = 0, time.monotonic() + 20
        while not status and time.monotonic() < end:
            connection.sendall(b" ")
            try:
                status, _ = response(connection)
            except TimeoutError:
                continue
    assert status == 408


def test_total_buffered_bytes_are_limited(address: str) -> None:
    connections = [socket.create_connection(tuple(address[7:].split(":")), 30) for _ in range(6)]
    try:
        for connection in connections:
            connection.sendall(head(MIB) + b" " * (MIB - 1))
        refused = [connection for connection in connections if answers_soon(connection)]
        assert 1 <= len(refused) < 6
        assert {response(connection)[0] for connection in refused} <= {408, 429}
    finally:
        for connection in connections:
            connection.close()
    eventually(
        lambda: http.post(f"{address}/infer", json={"text": "a"}).status_code == 200,
        "the server recovers",
    )


def answers_soon(connection: socket.socket) -> bool:
    connection.settimeout(1)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


def test_oversized_text_is_not_tokenized(address: str) -> None:
    answer = http.post(f"{address}/infer", json={"texts": ["a", "a" * 5001]})
    assert answer.status_code == 413
    assert "document 1" in answer.json()["detail"]
    assert "5000 characters, got 5001" in answer.json()["detail"]
    assert http.post(f"{address}/infer", json={"text": "a" * 5000}).status_code == 200
