"""Watching a server from outside, and talking to it as no well-behaved client does."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

http = httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""Each request on a connection of its own; ``httpx.get`` would read all certificates for each.

An answer may take a minute: the 5 s of httpx are short for a machine that runs other tests too."""


def metric(address: str, name: str, key: str = "", /, **labels: str) -> float:
    """The sum of the series of ``GET /metrics`` with these labels; 0 where there is none yet."""
    text = http.get(f"{address}/metrics", headers={"X-API-Key": key} if key else {}).text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def eventually(condition: Callable[[], object], what: str, *, seconds: int = 120) -> None:
    """Waits until ``condition`` holds, for two minutes unless told otherwise.

    Counted in looks, not by the clock: a machine that was paused is not late.
    """
    for _ in range(100 * seconds):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"never happened: {what}")


def measured_info(address: str) -> dict[str, Any]:
    """The answer of ``GET /info`` once all costs are measured."""
    eventually(
        lambda: not http.get(f"{address}/info").json()["calibration"]["measuring"],
        "the costs are measured",
    )
    info: dict[str, Any] = http.get(f"{address}/info").json()
    return info


@contextmanager
def raw_connection(address: str) -> Iterator[socket.socket]:
    """A plain socket to the server."""
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port or 80), timeout=60) as connection:
        yield connection


def head(body_bytes: int | None, *headers: str) -> bytes:
    """The first lines of ``POST /infer``; chunked where the length of the body is None."""
    length = "Transfer-Encoding: chunked" if body_bytes is None else f"Content-Length: {body_bytes}"
    lines = ["POST /infer HTTP/1.1", "Host: localhost", "Content-Type: application/json", length]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


def response(connection: socket.socket) -> tuple[int, bytes]:
    """Reads a response to the end of its announced body; status 0 where there is none."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        if not part:
            return 0, received
        received += part
    top, _, body = received.partition(b"\r\n\r\n")
    lines = top.decode().lower().split("\r\n")
    sizes = [int(line.split(":")[1]) for line in lines if line.startswith("content-length:")]
    while len(body) < (sizes or [0])[0]:
        body += connection.recv(65536)
    return int(lines[0].split()[1]), body


GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b'{"status":"alive"}'
"""Body of the response to ``GET``."""
BODY = b'{"text": "ab"}'
POST = head(len(BODY)) + BODY
CHUNKED = b"Transfer-Encoding: chunked"
"""Header of ``head(None)`` that names the coding of the body."""


def read_to_end(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = bytearray()
    while part := connection.recv(65536):
        received += part
    return bytes(received)


def refusal(address: str, sent: bytes) -> tuple[int, str]:
    """Return the status and the detail of a response that closes the connection."""
    with raw_connection(address) as connection:
        connection.sendall(sent)
        status, body = response(connection)
        assert connection.recv(1) == b""
    return status, json.loads(body)["detail"]
