"""The end of a server: by one signal, by two, or by a fault."""

import json
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from altered_bundles import ENDLESS, hanging_bundle
from clients import eventually, head, http, metric, raw_connection, response
from commands import run_python
from servers import MORTAL, serving


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


@pytest.fixture(scope="module")
def hanging(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lifecycle") / "endless_model.bundle"
    return hanging_bundle(Path(shutil.copytree(bundle_folder, folder)))


def post(address: str, *documents: list[int]) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": list(documents)}, timeout=60)


def readiness(address: str) -> tuple[int, str]:
    answer = http.get(f"{address}/readyz")
    return answer.status_code, answer.json()["status"]


def test_draining_server_still_answers(bundle_folder: Path, tmp_path: Path) -> None:
    with serving(bundle_folder, tmp_path / "log", "--drain-seconds", "8") as (address, process):
        assert readiness(address) == (200, "ready")
        assert metric(address, "aftserve_ready") == 1
        process.send_signal(signal.SIGTERM)
        eventually(lambda: readiness(address) == (503, "draining"), "the server drains")
        answer = post(address, [5])
        assert answer.status_code == 200
        # The client's next request must reach another server.
        assert answer.headers["Connection"] == "close"
        assert metric(address, "aftserve_ready") == 0
        assert process.wait(30) == 0


def test_stop_answers_accepted_requests(
    bundle_folder: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    options = ("--drain-seconds", "0", "--threads", "1")
    with serving(bundle_folder, tmp_path / "log", *options) as (address, process):
        answers = [pool.submit(post, address, [7] * 200_000) for _ in range(16)]
        eventually(lambda: metric(address, "aftserve_waiting_documents") > 0, "documents wait")
        accepted = metric(address, "aftserve_waiting_documents")
        process.send_signal(signal.SIGTERM)
        codes = [status(answer) for answer in answers]
        assert process.wait(30) == 0
    assert set(codes) <= {200, None}  # None: the server had closed its listener
    assert codes.count(200) >= accepted


def status(answer: "object") -> int | None:
    try:
        return answer.result().status_code  # type: ignore[attr-defined,no-any-return]
    except httpx.ConnectError:
        return None


def test_endless_work_gets_error_at_shutdown(
    hanging: Path, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    """The exit status is 1 because an accepted request failed."""
    options = ("--drain-seconds", "0", "--shutdown-seconds", "1", "--stall-seconds", "300")
    with serving(hanging, tmp_path / "log", *options) as (address, process):
        answer = pool.submit(post, address, [ENDLESS])
        eventually(lambda: metric(address, "aftserve_running_documents") == 1, "the document runs")
        process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 503
        assert process.wait(30) == 1


_PAUSING = """
import signal, time
from aftexport.system.process import end_process
from aftserve.cli import main

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1))
end_process(main)
"""
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has no IPv6")
def test_backlog_is_answered_at_shutdown(bundle_folder: Path, tmp_path: Path) -> None:
    """The backlog holds IPv4 and IPv6 connections that the loop accepts only after the signal."""
    program = ("-c", _PAUSING)
    with serving(bundle_folder, tmp_path / "log", "--host", "::", program=program) as (
        address,
        process,
    ):
        port = urlsplit(address).port
        places = [f"http://{host}:{port}" for host in ("[::1]", "127.0.0.1")]
        assert f" running on http://[::]:{port} and http://0.0.0.0:{port} " in (
            tmp_path / "log"
        ).read_text("utf-8")
        with ExitStack() as stack:
            kept, begun = (stack.enter_context(raw_connection(places[0])) for _ in range(2))
            kept.sendall(GET)
            assert response(kept)[0] == 200
            begun.sendall(GET[:10])
            time.sleep(0.1)
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
            waiting = [stack.enter_context(raw_connection(place)) for place in places * 5]
            for connection in (kept, *waiting):
                connection.sendall(GET)
            process.send_signal(signal.SIGINT)  # SIGINT does not drain
            for connection in (kept, *waiting):
                assert response(connection)[0] == 200
                assert connection.recv(1) == b""
            begun.sendall(GET[10:])
            assert response(begun)[0] == 200
        assert process.wait(30) == 0


# The server gets the signal before it loads the model.
SIGNAL_BEFORE_LOADING = """
import os, signal, sys
from aftserve import server
from aftserve.cli import main

load_model, number = server.load_model, signal.Signals[sys.argv.pop()]
# A suite that runs in the background inherits an ignored SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

def load_late(*given):
    os.kill(os.getpid(), number)
    return load_model(*given)

server.load_model = load_late
sys.exit(main())
"""


@pytest.mark.parametrize(("name", "expected"), [("SIGTERM", 0), ("SIGINT", 130)])
def test_signal_while_loading_exits(
    name: str, expected: int, bundle_folder: Path, tmp_path: Path
) -> None:
    words = (bundle_folder, "--port", "0", name)
    outcome = run_python("-c", SIGNAL_BEFORE_LOADING, *words, cwd=tmp_path)
    assert outcome.code == expected, outcome.err
    assert "Traceback" not in outcome.err


def test_second_signal_exits_at_once(hanging: Path, tmp_path: Path) -> None:
    options = ("--drain-seconds", "100", "--stall-seconds", "300")
    with serving(hanging, tmp_path / "log", *options) as (address, process):
        body = json.dumps({"input_ids": [[ENDLESS]]}).encode()
        with raw_connection(address) as connection:
            connection.sendall(head(len(body)) + body)
            eventually(
                lambda: metric(address, "aftserve_running_documents") == 1, "the document runs"
            )
            for expected in (503, 0, 0):
                process.send_signal(signal.SIGTERM)
                eventually(lambda: code_of(address) == expected, "the signal takes effect")  # noqa: B023
            assert process.wait(30) is not None


def code_of(address: str) -> int:
    try:
        return readiness(address)[0]
    except httpx.TransportError:
        return 0


def test_dead_engine_thread_ends_server(bundle_folder: Path, tmp_path: Path) -> None:
    """Waiting requests get status 503, and the process exits with 1."""
    log = tmp_path / "log"
    # Otherwise the thread may end in a measurement, and the process before the next request.
    with serving(bundle_folder, log, program=MORTAL, measured=True) as (address, process):
        assert post(address, [5]).status_code == 200
        process.send_signal(signal.SIGUSR1)
        assert post(address, [5]).status_code == 503
        assert process.wait(30) == 1
    assert "EngineThreadError" in log.read_text("utf-8")


def test_paused_process_continues(bundle_folder: Path, tmp_path: Path) -> None:
    with serving(bundle_folder, tmp_path / "log", "--stall-seconds", "2") as (address, process):
        process.send_signal(signal.SIGSTOP)
        with raw_connection(address) as connection:
            connection.settimeout(4)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            process.send_signal(signal.SIGCONT)
            connection.settimeout(60)
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert response(connection)[0] == 200
        assert post(address, [5]).status_code == 200


def test_stalled_loop_ends_process(bundle_folder: Path, tmp_path: Path) -> None:
    blocking = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000)); "
    program = ("-c", f"{blocking}import sys; from aftserve.cli import main; sys.exit(main())")
    log = tmp_path / "log"
    with serving(bundle_folder, log, "--stall-seconds", "2", program=program) as (_, process):
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 1
    assert "most recent call first" in log.read_text("utf-8")
