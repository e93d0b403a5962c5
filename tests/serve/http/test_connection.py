"""Requests on a connection: valid, malformed, pipelined, and those of clients that leave."""

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
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
    metric,
    raw_connection,
    read_to_end,
    refusal,
    response,
)
from fastapi import FastAPI
from prometheus_client import Counter
from servers import address_of, no_content, running, serving

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
        await no_content(scope, receive, send)

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
        await no_content(scope, receive, send)

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


MIB = 1 << 20


ENDLESS_STARTS = {
    "header": b"GET /healthz HTTP/1.1\r\nX: ",
    "path": b"GET /" + b"a" * 1000,
    "chunk": head(None) + b"1;",
    "trailer": head(None) + b"1\r\n \r\n0\r\nX: ",
}
MALFORMED = {
    "TLS": b"\x16\x03\x01 TLS\r\n\r\n",
    "no host": GET.replace(b"Host: x\r\n", b""),
    "two hosts": GET.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n"),
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "chunk size": head(None) + b"x\r\n",
} | {
    header.decode(): head(None).replace(CHUNKED, header) + b"{}"
    for header in (
        b"Content-Length: x",
        b"Content-Length: -1",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: chunked, gzip",
    )
}


@pytest.mark.parametrize("start", ENDLESS_STARTS.values(), ids=ENDLESS_STARTS)
def test_oversized_head_or_chunk_gets_431(start: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):  # the server may refuse it during the upload
            connection.sendall(start + b"a" * (MIB // 4))
        assert response(connection)[0] == 431


def test_too_many_headers_get_431(address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):  # as above
            connection.sendall(GET[:-2] + b"X: a\r\n" * 50_000)
        assert response(connection)[0] == 431


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_refused_and_counted(sent: bytes, address: str) -> None:
    series = {"path": "other", "status": "400"}
    before = metric(address, "aftserve_responses_total", **series)
    status, problem = refusal(address, sent)
    assert status == 400
    assert "not HTTP" in problem
    assert metric(address, "aftserve_responses_total", **series) == before + 1


@pytest.mark.parametrize(
    "coding",
    [
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: GZIP ,\tchunked",
        b"Upgrade: h2c\r\nConnection: upgrade\r\nTransfer-Encoding: gzip, chunked",
    ],
)
def test_unknown_transfer_coding_gets_501(coding: bytes, address: str) -> None:
    status, problem = refusal(address, head(None).replace(CHUNKED, coding) + b"0\r\n\r\n")
    assert status == 501
    assert "without other codings" in problem


def test_url_without_path_is_refused(address: str) -> None:
    status, problem = refusal(address, GET.replace(b"/healthz", b"http://x"))
    assert status == 400
    assert "without a path" in problem


@pytest.mark.parametrize(
    "bad", [b"nonsense\r\n\r\n", head(None) + b"ZZ\r\n"], ids=["head", "chunk"]
)
def test_bad_request_keeps_earlier_answers(bad: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET * 20 + bad + GET)
        assert read_to_end(connection).count(ANSWER) == 20


SENT = {
    "GET": (GET, 1),
    "POST": (POST, 1),
    "chunks": (head(None) + b"e\r\n" + BODY + b"\r\n0\r\n\r\n", 1),
    "long body": (head(300_014) + BODY + b" " * 300_000, 1),
    "HTTP/1.0": (POST.replace(b"HTTP/1.1", b"HTTP/1.0"), 1),
    "three": (POST * 3, 3),
    "GET and POST": (GET + POST, 2),
    "incomplete second body": (GET + POST[:-1], 1),
    "incomplete second head": (GET + GET[:-1], 1),
    "incomplete body": (POST[:-1], 0),
    "incomplete head": (GET[:-1], 0),
    "nothing": (b"", 0),
}
"""The bytes before a client ends its side, and the number of answers."""


@pytest.mark.parametrize("at_once", [True, False], ids=["pipelined", "later"])
def test_disconnect_cancels_running_request(at_once: bool) -> None:
    """The running request hears of the disconnect, though another request follows it."""
    runs, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    with running(app) as server:
        with raw_connection(address_of(server)) as connection:
            connection.sendall(GET * 2 if at_once else GET)
            assert runs.wait(60)
            if not at_once:
                time.sleep(0.2)  # by then the connection reads again
                connection.sendall(GET)
                time.sleep(0.2)
        assert left.wait(60)


@pytest.mark.parametrize(("sent", "answers"), SENT.values(), ids=SENT)
def test_half_closed_client_gets_its_answers(sent: bytes, answers: int, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert read_to_end(connection).count(b"HTTP/1.1 200 ") == answers


def test_half_closed_client_gets_interim_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has left refuses the interim responses; its request is cancelled."""
    monkeypatch.setattr("aftserve.http.connection._PROBE_SECONDS", 0.05)
    go_on, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/leave":
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            return
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await no_content(scope, receive, send)

    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    with running(app) as server, raw_connection(address_of(server)) as connection:
        with raw_connection(address_of(server)) as leaving:
            leaving.sendall(GET.replace(b"/healthz", b"/leave"))
            leaving.shutdown(socket.SHUT_WR)
            assert leaving.recv(len(interim)) == interim
            assert not left.is_set()
        assert left.wait(30)
        connection.sendall(GET)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(len(interim)) == interim
        go_on.set()
        *interims, answer = read_to_end(connection).split(interim)
        assert answer.startswith(b"HTTP/1.1 204 ")
        assert set(interims) <= {b""}


_FEW_FILES = (
    "-c",
    """
import resource, sys
from aftserve.cli import main

resource.setrlimit(resource.RLIMIT_NOFILE, (80, 100))
sys.exit(main())
""",
)


def test_open_file_limit_is_logged_once(bundle_folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(bundle_folder, log, program=_FEW_FILES, measured=True) as (address, process):
        warning = "files are open, the limit is 100"

        def open_files() -> int:
            return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))

        with ExitStack() as stack:
            while (before := open_files()) < 85:
                stack.enter_context(raw_connection(address))
                eventually(lambda: open_files() > before, "the connection is accepted")
            assert warning not in log.read_text("utf-8")
            for _ in range(40):
                stack.enter_context(raw_connection(address))
            eventually(lambda: warning in log.read_text("utf-8"), "the warning is logged")
        eventually(lambda: open_files() < 80, "the connections are closed")
        assert http.get(f"{address}/healthz").status_code == 200
    assert log.read_text("utf-8").count(warning) == 1
