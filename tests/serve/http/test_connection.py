"""What arrives on a connection and is no request, or not yet, or many."""

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from clients import eventually, head, http, metric, raw_connection, response
from fastapi import FastAPI
from prometheus_client import Counter
from servers import serving

from aftserve.api.error_responses import handle_problems
from aftserve.http import departure_probe
from aftserve.http.access_log import AccessLogMiddleware
from aftserve.http.connection import Connection
from aftserve.observability.health import Health

MIB = 1 << 20
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b'{"status":"alive"}'


@pytest.fixture(scope="module")
def address(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("connection") / "log"
    with serving(bundle_folder, log, "--receive-seconds", "5") as (address, _):
        yield address
    assert "Traceback" not in log.read_text("utf-8")


@contextmanager
def running(app: Any, seconds: float = 60, **options: Any) -> Iterator[uvicorn.Server]:
    """A server of another application behind such connections."""
    responses = Counter("responses", "", ["path", "status"], registry=None)
    http = Connection.within(seconds, responses, Health())
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            http=http,
            lifespan="off",
            log_config=None,
            timeout_graceful_shutdown=1,
            **options,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        eventually(lambda: server.started, "the server starts")
        yield server
    finally:
        server.should_exit = True
        thread.join()


def test_server_error_closes_the_connection() -> None:
    app = FastAPI()
    handle_problems(app)

    @app.get("/fault")
    async def fault() -> None:
        raise RuntimeError

    with running(app) as server, httpx.Client(base_url=address_of(server)) as client:
        for _ in range(3):
            answer = client.get("/fault")
            assert answer.status_code == 500
            assert answer.headers["connection"] == "close"


def parsed(server: uvicorn.Server) -> list[bytes]:
    """As much of the URLs as has arrived on each connection."""
    return [getattr(found, "url", b"") for found in server.server_state.connections]


def test_request_starts_at_first_byte() -> None:
    begun = list[float]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append(scope["state"]["started"])
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    logged = AccessLogMiddleware(
        app, Counter("named", "", ["path", "status"], registry=None), names=True
    )
    with running(logged) as server, raw_connection(address_of(server)) as connection:
        for _ in range(2):  # the second on a connection that was kept
            before = time.monotonic()
            connection.sendall(GET[:10])
            eventually(lambda: GET[4:10] in parsed(server), "it is parsed")
            between = time.monotonic()
            connection.sendall(GET[10:])
            assert response(connection)[0] == 204
            assert before <= begun[-1] <= between


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
    with serving(bundle_folder, log, program=_FEW_FILES) as (address, process):
        opened = Path(f"/proc/{process.pid}/fd")
        said = "files are open, the limit is 100"
        with ExitStack() as stack:
            while len(list(opened.iterdir())) < 85:
                before = len(list(opened.iterdir()))
                stack.enter_context(raw_connection(address))
                eventually(lambda: len(list(opened.iterdir())) > before, "it is accepted")  # noqa: B023
            assert said not in log.read_text("utf-8")
            for _ in range(40):
                stack.enter_context(raw_connection(address))
            eventually(lambda: said in log.read_text("utf-8"), "it is said")
        eventually(lambda: len(list(opened.iterdir())) < 80, "they are closed")
        assert http.get(f"{address}/healthz").status_code == 200
    assert log.read_text("utf-8").count(said) == 1


def address_of(server: uvicorn.Server) -> str:
    host, port = server.servers[0].sockets[0].getsockname()
    return f"http://{host}:{port}"


def everything(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = bytearray()
    while part := connection.recv(65536):
        received += part
    return bytes(received)


def refused(address: str, sent: bytes) -> tuple[int, str]:
    with raw_connection(address) as connection:
        connection.sendall(sent)
        status, body = response(connection)
        assert connection.recv(1) == b""
    return status, json.loads(body)["detail"]


@pytest.mark.parametrize("start", [b"", b"POST /infer HT", b"GET /readyz HTTP/1.1\r\nHost: x\r\n"])
def test_incomplete_headers_get_408(start: bytes, address: str) -> None:
    status, problem = refused(address, start)
    assert status == 408
    assert "5 s" in problem


@pytest.mark.parametrize("asked", [(), ("Connection: upgrade", "Upgrade: h2c")])
def test_body_timeout_starts_with_headers(asked: tuple[str, ...], address: str) -> None:
    start, end = head(100, *asked)[:-2], head(100, *asked)[-2:]
    with raw_connection(address) as connection:
        started = time.monotonic()
        connection.sendall(start)
        time.sleep(4)
        connection.sendall(end + b'{"text":')
        status, body = response(connection)
        taken = time.monotonic() - started
    assert status == 408
    assert "The request did not arrive within 5 s" in json.loads(body)["detail"]
    assert taken < 8  # as long again from the end of the headers would be 9


@pytest.mark.parametrize("ahead", [b"", GET[:10]])
def test_kept_connection_has_header_timeout(ahead: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET + ahead)
        assert response(connection)[0] == 200
        if not ahead:
            connection.sendall(GET[:10])
        assert response(connection)[0] == 408


def test_idle_connection_outlives_request_timeout() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    with (
        running(app, seconds=1, timeout_keep_alive=60) as server,
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


@pytest.mark.parametrize(
    "start",
    [
        b"GET /healthz HTTP/1.1\r\nX: ",
        b"GET /" + b"a" * 1000,
        head(None) + b"1;",
        head(None) + b"1\r\n \r\n0\r\nX: ",
    ],
    ids=["header", "path", "chunk", "trailer"],
)
def test_oversized_head_or_chunk_gets_431(start: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):  # it may be refused while it is sent
            connection.sendall(start + b"a" * (MIB // 4))
        assert response(connection)[0] == 431


def test_too_many_headers_get_431(address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):
            connection.sendall(GET[:-2] + b"X: a\r\n" * 50_000)
        assert response(connection)[0] == 431


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 TLS\r\n\r\n",
        GET.replace(b"Host: x\r\n", b""),
        GET.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n"),
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        *(
            head(None).replace(b"Transfer-Encoding: chunked", length) + b"{}"
            for length in (
                b"Content-Length: x",
                b"Content-Length: -1",
                b"Content-Length: 5\r\nContent-Length: 6",
                b"Content-Length: 2\r\nTransfer-Encoding: chunked",
                b"Transfer-Encoding: gzip",
                b"Transfer-Encoding: chunked, gzip",
            )
        ),
        head(None) + b"x\r\n",
    ],
)
def test_malformed_request_is_refused_and_counted(sent: bytes, address: str) -> None:
    series = {"path": "other", "status": "400"}
    before = metric(address, "aftserve_responses_total", **series)
    status, problem = refused(address, sent)
    assert status == 400
    assert "not HTTP" in problem
    assert metric(address, "aftserve_responses_total", **series) == before + 1


CHUNKED = b"Transfer-Encoding: chunked"


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
    status, problem = refused(address, head(None).replace(CHUNKED, coding) + b"0\r\n\r\n")
    assert status == 501
    assert "without other codings" in problem


def test_chunked_header_ignores_case_and_spaces(address: str) -> None:
    for coding in (b"Transfer-Encoding:Chunked", b"transfer-encoding: chunked "):
        with raw_connection(address) as connection:
            start = head(None).replace(CHUNKED, coding)
            connection.sendall(start + b'd\r\n{"text": "a"}\r\n0\r\n\r\n')
            assert response(connection)[0] == 200


def test_url_without_path_is_refused(address: str) -> None:
    status, problem = refused(address, GET.replace(b"/healthz", b"http://x"))
    assert status == 400
    assert "without a path" in problem


def test_http10_needs_no_host(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert everything(connection).endswith(ANSWER)


def test_http10_gets_no_interim_response(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(
            b"POST /infer HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 14\r\n\r\n" + b'{"text": "ab"}'
        )
        assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(address: str) -> None:
    count = 1000
    ahead = b"".join(GET[:-2] + b"X-Request-ID: %d\r\n\r\n" % index for index in range(count))
    with raw_connection(address) as connection:
        connection.sendall(ahead + GET[:-2] + b"Connection: close\r\n\r\n")
        received = everything(connection)
    assert received.count(ANSWER) == count + 1
    places = [received.index(b"x-request-id: %d\r\n" % index) for index in range(count)]
    assert places == sorted(places)


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", head(None) + b"ZZ\r\n"])
def test_bad_request_keeps_earlier_answers(bad: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET * 20 + bad + GET)
        assert everything(connection).count(ANSWER) == 20


def test_upgrade_request_is_answered_as_http(address: str) -> None:
    body = b'{"text": "a"}'
    asks = head(len(body), "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c") + body
    with raw_connection(address) as connection:
        connection.sendall(asks + GET)
        assert response(connection)[0] == 200
        connection.sendall(GET)
        assert response(connection)[1].startswith(ANSWER)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_upgrade_with_close_ends_connection(version: bytes, address: str) -> None:
    body = b'{"text": "a"}'
    asks = head(len(body), "Connection: close, Upgrade", "Upgrade: h2c") + body
    with raw_connection(address) as connection:
        connection.sendall(asks.replace(b"HTTP/1.1", b"HTTP/" + version))
        assert response(connection)[0] == 200
        assert connection.recv(1) == b""


def test_slow_parsing_keeps_pipelined_request() -> None:
    """One that is ahead of its turn, whose headers are still parsed when that comes."""

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


@pytest.mark.parametrize("at_once", [True, False])
def test_disconnect_cancels_running_request(
    at_once: bool,
) -> None:
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
                time.sleep(0.2)  # by then it waits for what comes
                connection.sendall(GET)
                time.sleep(0.2)
        assert left.wait(60)


BODY = b'{"text": "ab"}'
POST = head(len(BODY)) + BODY


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        (GET, 1),
        (POST, 1),
        (head(None) + b"e\r\n" + BODY + b"\r\n0\r\n\r\n", 1),
        (head(300_014) + BODY + b" " * 300_000, 1),
        (POST.replace(b"HTTP/1.1", b"HTTP/1.0"), 1),
        (POST * 3, 3),
        (GET + POST, 2),
        (GET + POST[:-1], 1),
        (GET + GET[:-1], 1),
        (POST[:-1], 0),
        (GET[:-1], 0),
        (b"", 0),
    ],
)
def test_half_closed_client_gets_its_answers(sent: bytes, answers: int, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection).count(b"HTTP/1.1 200 ") == answers


def test_half_closed_client_gets_interim_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets interim responses meanwhile, which a client that has left would refuse."""
    monkeypatch.setattr(departure_probe, "_PROBE_SECONDS", 0.05)
    go_on, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/leave":
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            return
        while not go_on.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

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
        *interims, answer = everything(connection).split(interim)
        assert answer.startswith(b"HTTP/1.1 204 ")
        assert set(interims) <= {b""}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "request_",
    [
        POST.replace(b"application/json", b"image/png"),  # 415
        POST.replace(b"/infer", b"/info"),  # 405
        POST.replace(b"/infer", b"/absent"),  # 404
        POST.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n"),  # 415
        POST.replace(b"\r\n\r\n", b"\r\nSec-Fetch-Site: cross-site\r\n\r\n"),  # 403
        (head(None) + b"e\r\n" + BODY + b"\r\n0\r\n\r\n").replace(b"/infer", b"/info"),
        (head(100_014) + BODY + b" " * 100_000).replace(b"/infer", b"/info"),
        POST.replace(b"POST /infer", b"GET /healthz"),  # 200
    ],
)
def test_unwanted_body_keeps_connection_open(request_: bytes, apart: bool, address: str) -> None:
    top, _, body = request_.partition(b"\r\n\r\n")
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
    body = json.dumps({"text": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with raw_connection(address) as connection:
        connection.sendall(head(None) + chunks + b"0\r\nX-Request-ID: trailer\r\n\r\n")
        status, content = response(connection)
    assert status == 200
    assert json.loads(content)["tokens_total"] > 0


def test_client_that_reads_nothing_is_disconnected(address: str) -> None:
    requests = GET.replace(b"/healthz", b"/openapi.json") * 1_000_000
    with raw_connection(address) as connection, pytest.raises(ConnectionError):
        connection.sendall(requests)


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"])
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
            eventually(lambda: answered == count, "it is answered")  # noqa: B023
            time.sleep(0.01)
            if unsent():
                break
        connection.sendall(GET[:-2] + last + b"\r\n")
        eventually(lambda: not server.server_state.connections, "the connection ends")


def test_endless_chunks_do_not_delay_others(address: str) -> None:
    """Eight of them; parsed as they come, each turn of theirs took a second and more."""
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
