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


def test_after_a_fault_the_client_is_told_that_the_connection_closes() -> None:
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


def test_a_request_begins_with_its_first_byte() -> None:
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


def test_as_many_connect_as_the_system_lets_and_then_the_log_says_so(
    bundle_folder: Path, tmp_path: Path
) -> None:
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
def test_headers_that_do_not_arrive_close_the_connection(start: bytes, address: str) -> None:
    status, problem = refused(address, start)
    assert status == 408
    assert "5 s" in problem


@pytest.mark.parametrize("asked", [(), ("Connection: upgrade", "Upgrade: h2c")])
def test_the_time_of_a_request_begins_with_its_headers(
    asked: tuple[str, ...], address: str
) -> None:
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
def test_a_connection_kept_for_a_second_request_is_watched_too(ahead: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET + ahead)
        assert response(connection)[0] == 200
        if not ahead:
            connection.sendall(GET[:10])
        assert response(connection)[0] == 408


def test_a_connection_is_kept_for_longer_than_a_request_may_take() -> None:
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


def test_a_connection_is_kept_as_long_as_the_setting_says(
    bundle_folder: Path, tmp_path: Path
) -> None:
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
def test_what_never_ends_is_refused(start: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):  # it may be refused while it is sent
            connection.sendall(start + b"a" * (MIB // 4))
        assert response(connection)[0] == 431


def test_many_headers_are_as_bad_as_a_long_one(address: str) -> None:
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
def test_what_is_no_http_is_refused_and_counted(sent: bytes, address: str) -> None:
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
def test_a_transfer_coding_that_is_not_known_is_said_so(coding: bytes, address: str) -> None:
    status, problem = refused(address, head(None).replace(CHUNKED, coding) + b"0\r\n\r\n")
    assert status == 501
    assert "without other codings" in problem


def test_a_body_in_chunks_is_read_however_its_coding_is_written(address: str) -> None:
    for coding in (b"Transfer-Encoding:Chunked", b"transfer-encoding: chunked "):
        with raw_connection(address) as connection:
            start = head(None).replace(CHUNKED, coding)
            connection.sendall(start + b'd\r\n{"text": "a"}\r\n0\r\n\r\n')
            assert response(connection)[0] == 200


def test_a_url_without_a_path_is_refused(address: str) -> None:
    status, problem = refused(address, GET.replace(b"/healthz", b"http://x"))
    assert status == 400
    assert "without a path" in problem


def test_http_1_0_needs_no_host(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert everything(connection).endswith(ANSWER)


def test_http_1_0_knows_of_no_interim_answer(address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(
            b"POST /infer HTTP/1.0\r\nContent-Type: application/json\r\n"
            b"Expect: 100-continue\r\nContent-Length: 14\r\n\r\n" + b'{"text": "ab"}'
        )
        assert everything(connection).startswith(b"HTTP/1.1 200 ")


def test_requests_ahead_of_their_answers_are_answered_in_order(address: str) -> None:
    count = 1000
    ahead = b"".join(GET[:-2] + b"X-Request-ID: %d\r\n\r\n" % index for index in range(count))
    with raw_connection(address) as connection:
        connection.sendall(ahead + GET[:-2] + b"Connection: close\r\n\r\n")
        received = everything(connection)
    assert received.count(ANSWER) == count + 1
    places = [received.index(b"x-request-id: %d\r\n" % index) for index in range(count)]
    assert places == sorted(places)


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", head(None) + b"ZZ\r\n"])
def test_a_bad_request_does_not_cost_those_before_it_their_answers(
    bad: bytes, address: str
) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET * 20 + bad + GET)
        assert everything(connection).count(ANSWER) == 20


def test_who_asks_for_another_protocol_gets_an_answer_in_this_one(address: str) -> None:
    body = b'{"text": "a"}'
    asks = head(len(body), "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c") + body
    with raw_connection(address) as connection:
        connection.sendall(asks + GET)
        assert response(connection)[0] == 200
        connection.sendall(GET)
        assert response(connection)[1].startswith(ANSWER)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_who_asks_for_another_protocol_and_the_end_gets_both(version: bytes, address: str) -> None:
    body = b'{"text": "a"}'
    asks = head(len(body), "Connection: close, Upgrade", "Upgrade: h2c") + body
    with raw_connection(address) as connection:
        connection.sendall(asks.replace(b"HTTP/1.1", b"HTTP/" + version))
        assert response(connection)[0] == 200
        assert connection.recv(1) == b""


def test_headers_that_are_parsed_in_turns_are_a_request_in_time() -> None:
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
def test_who_leaves_is_gone_for_the_request_that_runs_and_not_for_its_last_alone(
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


def test_half_closed_client_waits_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_connection_outlives_body_that_is_not_wanted(
    request_: bytes, apart: bool, address: str
) -> None:
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


def test_a_body_of_tiny_chunks_is_a_body(address: str) -> None:
    body = json.dumps({"text": "a" * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    with raw_connection(address) as connection:
        connection.sendall(head(None) + chunks + b"0\r\nX-Request-ID: trailer\r\n\r\n")
        status, content = response(connection)
    assert status == 200
    assert json.loads(content)["tokens_total"] > 0


def test_who_reads_no_answers_is_cut_off(address: str) -> None:
    requests = GET.replace(b"/healthz", b"/openapi.json") * 1_000_000
    with raw_connection(address) as connection, pytest.raises(ConnectionError):
        connection.sendall(requests)


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"])
def test_who_does_not_read_the_end_of_an_answer_is_cut_off(last: bytes) -> None:
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


def test_whoever_sends_endless_tiny_chunks_does_not_hold_up_the_others(address: str) -> None:
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
