"""Requests on a connection: versions, chunks, pipelining, upgrades and parsing in turns."""

import json
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import pytest
import uvicorn
from clients import (
    ANSWER,
    BODY,
    CHUNKED,
    GET,
    POST,
    eventually,
    head,
    http,
    raw_connection,
    read_to_end,
    response,
)
from fastapi import FastAPI
from prometheus_client import Counter
from servers import address_of, running

from aftserve.api.error_responses import handle_problems
from aftserve.http.access_log import AccessLogMiddleware

UNWANTED = {
    "415 type": POST.replace(b"application/json", b"image/png"),
    "405": POST.replace(b"/infer", b"/info"),
    "404": POST.replace(b"/infer", b"/absent"),
    "415 encoding": POST.replace(b"\r\n\r\n", b"\r\nContent-Encoding: br\r\n\r\n"),
    "403": POST.replace(b"\r\n\r\n", b"\r\nSec-Fetch-Site: cross-site\r\n\r\n"),
    "405 chunks": (head(None) + b"e\r\n" + BODY + b"\r\n0\r\n\r\n").replace(b"/infer", b"/info"),
    "405 long": (head(100_014) + BODY + b" " * 100_000).replace(b"/infer", b"/info"),
    "200 GET": POST.replace(b"POST /infer", b"GET /healthz"),
}
"""Requests whose body the server does not need, by the status of their response."""


def test_server_error_closes_the_connection() -> None:
    app = FastAPI()
    handle_problems(app, {})

    @app.get("/fault")
    async def fault() -> None:
        raise RuntimeError

    with running(app) as server, httpx.Client(base_url=address_of(server), timeout=60) as client:
        for _ in range(3):
            answer = client.get("/fault")
            assert answer.status_code == 500
            assert answer.headers["connection"] == "close"


def parsed(server: uvicorn.Server) -> list[bytes]:
    """Return the part of the URL that each connection has received."""
    return [getattr(found, "url", b"") for found in server.server_state.connections]


def test_request_starts_at_first_byte() -> None:
    begun = list[float]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["state"]["started"])
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    logged = AccessLogMiddleware(
        app, Counter("named", "", ["path", "status", "model"], registry=None), names=True
    )
    with running(logged) as server, raw_connection(address_of(server)) as connection:
        for _ in range(2):  # the second request comes over the kept connection
            before = time.monotonic()
            connection.sendall(GET[:10])
            eventually(lambda: GET[4:10] in parsed(server), "the start is parsed")
            between = time.monotonic()
            connection.sendall(GET[10:])
            assert response(connection)[0] == 204
            assert before <= begun[-1] <= between


def test_chunked_header_ignores_case_and_spaces(address: str) -> None:
    for coding in (b"Transfer-Encoding:Chunked", b"transfer-encoding: chunked "):
        with raw_connection(address) as connection:
            start = head(None).replace(CHUNKED, coding)
            connection.sendall(start + b'd\r\n{"text": "a"}\r\n0\r\n\r\n')
            assert response(connection)[0] == 200


def test_http10_needs_no_host(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert read_to_end(connection).endswith(ANSWER)


def test_http10_gets_no_interim_response(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(
            b"POST /infer HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 14\r\n\r\n" + b'{"text": "ab"}'
        )
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(address: str) -> None:
    count = 1000
    ahead = b"".join(GET[:-2] + b"X-Request-ID: %d\r\n\r\n" % index for index in range(count))
    with raw_connection(address) as connection:
        connection.sendall(ahead + GET[:-2] + b"Connection: close\r\n\r\n")
        received = read_to_end(connection)
    assert received.count(ANSWER) == count + 1
    places = [received.index(b"x-request-id: %d\r\n" % index) for index in range(count)]
    assert places == sorted(places)


def test_upgrade_request_is_answered_as_http(address: str) -> None:
    body = b'{"text": "a"}'
    request = head(len(body), "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c") + body
    with raw_connection(address) as connection:
        connection.sendall(request + GET)
        assert response(connection)[0] == 200
        connection.sendall(GET)
        assert response(connection)[1].startswith(ANSWER)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_upgrade_with_close_ends_connection(version: bytes, address: str) -> None:
    body = b'{"text": "a"}'
    request = head(len(body), "Connection: close, Upgrade", "Upgrade: h2c") + body
    with raw_connection(address) as connection:
        connection.sendall(request.replace(b"HTTP/1.1", b"HTTP/" + version))
        assert response(connection)[0] == 200
        assert connection.recv(1) == b""


def test_slow_parsing_keeps_pipelined_request() -> None:
    """Keep-alive ends while the headers of the second request are still being parsed."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    with (
        running(app, timeout_keep_alive=1) as server,
        raw_connection(address_of(server)) as connection,
    ):
        connection.sendall(GET + head(1)[:-2] + b"a:\r\n" * 15_000 + b"\r\n")
        assert response(connection)[0] == 204
        time.sleep(1.5)
        connection.sendall(b"a")
        assert response(connection)[0] == 204


@pytest.mark.parametrize("apart", [False, True], ids=["with head", "after head"])
@pytest.mark.parametrize("sent", UNWANTED.values(), ids=UNWANTED)
def test_unwanted_body_keeps_connection_open(sent: bytes, apart: bool, address: str) -> None:
    top, _, body = sent.partition(b"\r\n\r\n")
    with raw_connection(address) as connection:
        for _ in range(2):
            connection.sendall(top + b"\r\n\r\n")
            if apart:
                time.sleep(0.01)
            connection.sendall(body)
            assert response(connection)[0] in (200, 403, 404, 405, 415)
        connection.sendall(POST)
        assert response(connection)[0] == 200


def test_body_in_tiny_chunks_is_read(address: str) -> None:
    body = json.dumps({"text": "a" * 5000}).ljust(20_000).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with raw_connection(address) as connection:
        connection.sendall(head(None) + chunks + b"0\r\nX-Request-ID: trailer\r\n\r\n")
        status, content = response(connection)
    assert status == 200
    assert json.loads(content)["tokens_total"] > 0


def test_endless_chunks_do_not_delay_others(address: str) -> None:
    """Eight clients send them; parsed without a time limit, each turn took over a second."""
    ended = threading.Event()

    def send() -> None:
        chunks = b"1\r\n \r\n" * 50_000
        while not ended.is_set():
            with suppress(OSError), raw_connection(address) as connection:
                connection.sendall(head(None))
                while not ended.is_set():
                    connection.sendall(chunks)

    threads = [threading.Thread(target=send) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(50):
            assert http.get(f"{address}/healthz", timeout=10).status_code == 200
    finally:
        ended.set()
        for thread in threads:
            thread.join()
