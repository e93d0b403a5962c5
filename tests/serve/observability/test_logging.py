"""Log lines and metrics of requests."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from clients import eventually, http, metric
from commands import environment, run_python
from prometheus_client import Counter, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from servers import address_of, free_port, running, serving

from aftserve.http.access_log import AccessLogMiddleware
from aftserve.observability.metrics import Metrics
from aftserve.observability.tracing import exemplar_labels, request_id


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "log"


@pytest.fixture(scope="module")
def address(bundle_folder: Path, log: Path) -> Iterator[str]:
    with serving(bundle_folder, log, "--log-format", "json") as (address, _):
        yield address


def lines(log: Path) -> list[dict[str, Any]]:
    """Return the lines that the server has logged; earlier output is not JSON."""
    complete, _, _ = log.read_text("utf-8").rpartition("\n")  # the last line may arrive in parts
    return [json.loads(line) for line in complete.splitlines() if line.startswith("{")]


def line_of(log: Path, request_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = [line for line in lines(log) if line.get("request_id") == request_id]
        return bool(found)

    eventually(look, f"a line for {request_id}")
    return found[0]


def test_request_id_of_client_is_logged(address: str, log: Path) -> None:
    answer = http.post(
        f"{address}/infer", json={"text": "abc"}, headers={"X-Request-ID": "order-7/3"}
    )
    assert answer.headers["x-request-id"] == "order-7/3"
    line = line_of(log, "order-7/3")
    assert line["message"] == "POST /infer 200"
    assert line["tokens"] == 3
    assert line["documents"] == 1
    assert line["seconds"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])


@pytest.mark.parametrize("name", ["", "two words", "a" * 129, 'a"b'])
def test_invalid_request_id_is_replaced(name: str, address: str) -> None:
    answer = http.get(f"{address}/healthz", headers={"X-Request-ID": name})
    assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["x-request-id"])


def test_path_cannot_forge_log_line(address: str, log: Path) -> None:
    answer = http.get(f'{address}/x%0a{{"level":"error"}}')
    assert answer.status_code == 404
    line = line_of(log, answer.headers["x-request-id"])
    assert line["message"].startswith("GET /x%0a")


def test_message_cannot_forge_log_line(tmp_path: Path) -> None:
    outcome = run_python(
        "-c", "import logging; from aftserve.observability.logging import configure_logging; "
        "configure_logging('text'); "
        "message = 'a\\n2026-01-01 INFO b\\x1b[31m'; "
        "logging.error('it says %s', message, extra={'fields': {'c': '\\r'}})",
        cwd=tmp_path,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    (line,) = outcome.err.splitlines()
    assert line.endswith(r"it says a\n2026-01-01 INFO b\x1b[31m c=\r")


PROBES = [
    "/healthz", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready",
    "/v2/models/MODEL/ready", "/v2/models/MODEL/versions/1/ready",
]  # fmt: skip


def test_probes_are_missing_at_info(address: str, log: Path, bundle_folder: Path) -> None:
    name = bundle_folder.name.removesuffix(".bundle")
    for number, path in enumerate(PROBES):
        headers = {"X-Request-ID": f"probe-{number}"}
        assert http.get(address + path.replace("MODEL", name), headers=headers).is_success
    http.get(f"{address}/v2/models/absent/ready", headers={"X-Request-ID": "absent"})
    assert line_of(log, "absent")["message"] == "GET /v2/models/absent/ready 404"
    assert not [line for line in lines(log) if line.get("request_id", "").startswith("probe-")]


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/healthz", 200, logging.DEBUG),
        ("/healthz", 503, logging.INFO),
        ("/infer", 200, logging.INFO),
    ],
)
def test_probe_is_logged_at_debug(
    path: str, status: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["route"] = SimpleNamespace(path=path)
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body"})

    responses = Counter("responses", "", ["path", "status", "model"], registry=None)
    logged = AccessLogMiddleware(app, responses, names=True, probes={"/healthz"})
    caplog.set_level(logging.DEBUG, "aftserve.request")
    with running(logged) as server:
        http.get(address_of(server) + path)
        eventually(lambda: [one for one in caplog.records if one.name == "aftserve.request"], "it")
    (record,) = [one for one in caplog.records if one.name == "aftserve.request"]
    assert (record.getMessage(), record.levelno) == (f"GET {path} {status}", level)


def test_response_is_counted_for_its_model() -> None:
    """Its model is released afterwards."""
    counts = list[float]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/metrics":
            scope["state"]["model"] = "a"
            series = metrics.responses.labels("other", "200", "a")
            scope["state"]["releases"].append(lambda: counts.append(series._value.get()))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body"})

    metrics = Metrics()
    with running(AccessLogMiddleware(app, metrics.responses, names=True)) as server:
        for path in ("/infer", "/infer", "/metrics"):
            http.get(address_of(server) + path)

        def counted(model: str) -> bytes:
            return f'aftserve_responses_total{{model="{model}",path="other",status="200"}}'.encode()

        eventually(lambda: counted("a") + b" 2.0" in metrics.exposition()[0], "the requests")
        eventually(lambda: counted("") + b" 1.0" in metrics.exposition()[0], "the other one")
    assert counts == [1, 2]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (
            "debug",
            [
                "aftserve.address INFO",
                "aftserve.a DEBUG",
                "aftserve.a INFO",
                "other INFO",
                "other ERROR",
            ],
        ),
        ("error", ["aftserve.address INFO", "other ERROR"]),
    ],
)
def test_level_hides_lower_lines(level: str, expected: list[str], tmp_path: Path) -> None:
    code = f"""
import logging
from aftserve.observability.logging import configure_logging
configure_logging("text", {level!r})
logging.getLogger("aftserve.address").info("")
logging.getLogger("aftserve.a").debug("")
logging.getLogger("aftserve.a").info("")
logging.getLogger("other").debug("")
logging.getLogger("other").info("")
logging.getLogger("other").error("")
"""
    outcome = run_python("-c", code, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    found = [re.search(r" ([A-Z]+) ([a-z.]+):", line) for line in outcome.err.splitlines()]
    assert [f"{one[2]} {one[1]}" for one in found if one] == expected


def test_unknown_paths_share_one_series(address: str) -> None:
    for number in range(5):
        http.get(f"{address}/nothing-{number}")
    assert metric(address, "aftserve_responses_total", path="other", status="404") >= 5
    assert metric(address, "aftserve_responses_total", path="/nothing-1", status="404") == 0


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v2", "/v2"),
        ("/v2/health/ready", "/v2/health/ready"),
        ("/v2/models/MODEL", "/v2/models/{name}"),
        ("/v2/models/MODEL/versions/1/ready", "/v2/models/{name}/versions/{version}/ready"),
        ("/info", "/info"),
    ],
)
def test_response_is_counted_by_route(
    path: str, route: str, address: str, bundle_folder: Path
) -> None:
    before = metric(address, "aftserve_responses_total", path=route, status="200")
    name = bundle_folder.name.removesuffix(".bundle")
    for request in (http.get, http.head):
        assert request(address + path.replace("MODEL", name)).status_code == 200
    after = metric(address, "aftserve_responses_total", path=route, status="200")
    assert after == before + 2


def test_every_stage_is_measured(address: str) -> None:
    names = ("tokenize", "queue", "inference")
    before = [metric(address, "aftserve_stage_seconds_count", stage=name) for name in names]
    http.post(f"{address}/infer", json={"texts": ["a", "b"]})
    after = [metric(address, "aftserve_stage_seconds_count", stage=name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [2, 2, 2]
    assert metric(address, "process_resident_memory_bytes") > 1 << 20
    assert metric(address, "aftserve_truncated_documents_total") == 0


def test_response_times_its_stages(address: str) -> None:
    answer = http.post(f"{address}/infer", json={"texts": ["a" * 3000, "b"]})
    timings = [one["timings"] for one in answer.json()["results"]]
    expected = {
        name: 1000 * max(one[f"{stage}_seconds"] for one in timings)
        for name, stage in [("tokenize", "tokenize"), ("queue", "queue"), ("compute", "inference")]
    }
    found = dict(re.findall(r"(\w+);dur=(\d+\.\d{3})", answer.headers["Server-Timing"]))
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        expected, abs=1e-3
    )
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}
    protocol = http.post(f"{address}/v2/models/model/infer", json={"inputs": [tensor]})
    assert "queue;dur=" in protocol.headers["Server-Timing"]
    assert "Server-Timing" not in http.get(f"{address}/info").headers


OPENMETRICS = "application/openmetrics-text"


def test_exemplar_names_request(address: str) -> None:
    headers = {"X-Request-ID": "exemplary/1"}
    assert http.post(f"{address}/infer", json={"text": "a"}, headers=headers).is_success
    scraped = http.get(f"{address}/metrics", headers={"Accept": f"{OPENMETRICS};version=1.0.0"})
    assert scraped.headers["Content-Type"] == f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    families = {one.name: one for one in text_string_to_metric_families(scraped.text)}
    exemplars = [
        sample.exemplar
        for sample in families["aftserve_stage_seconds"].samples
        if sample.exemplar and sample.exemplar.labels == {"request_id": "exemplary/1"}
    ]
    assert len(exemplars) == 3
    assert "aftserve_responses" in families


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "text/plain"),
        ("text/plain", "text/plain"),
        (f"{OPENMETRICS};q=0, text/plain", "text/plain"),
        (f"{OPENMETRICS}; version=x;q=0.5, text/plain;version=0.0.4;q=0.3", OPENMETRICS),
    ],
)
def test_metrics_format_is_negotiated(accept: str, kind: str, address: str) -> None:
    answer = http.get(f"{address}/metrics", headers={"Accept": accept})
    assert answer.headers["Content-Type"].startswith(f"{kind};")
    assert answer.text.endswith("# EOF\n") == (kind == OPENMETRICS)


@pytest.mark.parametrize(
    ("name", "trace", "expected"),
    [
        (None, None, None),
        ("a", None, {"request_id": "a"}),
        ("a", "0" * 32, {"trace_id": "0" * 32, "request_id": "a"}),
        ("a" * 118, None, {"request_id": "a" * 118}),
        ("a" * 119, None, None),
        ("a" * 79, "0" * 32, {"trace_id": "0" * 32}),
    ],
)
def test_exemplar_keeps_limit_of_format(
    name: str | None, trace: str | None, expected: dict[str, str] | None
) -> None:
    def labels() -> dict[str, str] | None:
        request_id.set(name)
        return exemplar_labels(trace)

    found = copy_context().run(labels)
    assert found == expected
    if found is not None:
        Histogram("seconds", "", registry=None).observe(1, found)


UNBLOCKED = "from aftserve.observability.logging import *\nunblock_output()\n"
_STALLING = """
import signal, sys, time
from aftserve.cli import main

signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1000))
sys.exit(main())
"""


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe that stays full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"a" * 4096)
    os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    os.close(reading)


@pytest.fixture
def left_pipe() -> Iterator[int]:
    """Yield the writing end of a pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def answers(address: str, path: str = "/healthz") -> bool:
    try:
        return http.get(address + path).status_code in (200, 404)
    except httpx.TransportError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)])
def test_full_output_does_not_stop_server(
    number: signal.Signals, code: int, full_pipe: int, bundle_folder: Path
) -> None:
    """The server starts, answers and ends, also if its event loop is blocked."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _STALLING, bundle_folder, "--port", str(port),
         "--stall-seconds", "2"],
        env=environment(AFTSERVE_DRAIN_SECONDS="0"),
        stdin=subprocess.DEVNULL, stdout=full_pipe, stderr=full_pipe,
    )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: process.poll() is not None or answers(address), "the server starts")
        for _ in range(30):
            assert answers(address, "/" + "a" * 10_000)
        assert metric(address, "aftserve_log_lines_dropped_total") > 0
        assert http.post(f"{address}/infer", json={"text": "abc"}).status_code == 200
        process.send_signal(number)
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait()


def run(
    program: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> tuple[int, str]:
    """Run a program with these streams; return its exit status and the output that is piped."""
    done = subprocess.run(
        [sys.executable, "-c", UNBLOCKED + program],
        env=environment(), stdin=subprocess.DEVNULL, timeout=60, text=True,
        stdout=stdout, stderr=stderr,
    )  # fmt: skip
    return done.returncode, f"{done.stdout or ''}{done.stderr or ''}"


_WRITES = {
    "print": "import sys; print('a\\n' * 100_000, file=sys.stderr); print('a')",
    "logging": "import logging; [logging.error('a' * 10_000) for _ in range(100)]",
    "warnings": "import warnings; [warnings.warn('a' * 10_000 + str(n)) for n in range(100)]",
    "native": "import os\ntry: os.write(2, b'a')\nexcept BlockingIOError: pass",
    "faulthandler": "import faulthandler; [faulthandler.dump_traceback() for _ in range(100)]",
    "exception": "import sys; raise SystemExit('a' * 200_000)",
    "rich": "from rich.console import Console; Console(stderr=True).print('a\\n' * 2_000)",
}


@pytest.mark.parametrize("write", _WRITES.values(), ids=_WRITES)
def test_full_output_does_not_block(write: str, full_pipe: int) -> None:
    code, other = run(write, stderr=full_pipe)
    assert code == ("SystemExit" in write)
    assert "Traceback" not in other
    assert os.get_blocking(full_pipe)  # other processes share the pipe


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_departed_reader_does_not_end_program(stream: str, left_pipe: int) -> None:
    program = (
        "import sys; print('a', file=sys.stdout); print('b', file=sys.stderr); flush_output();"
        "sys.exit(40 + dropped_lines())"
    )
    code, other = run(program, **{stream: left_pipe})
    assert code > 40
    if stream == "stdout":
        assert "standard output cannot be written (Broken pipe)" in other


def test_lines_stay_whole_and_ordered() -> None:
    program = "import os\nfor n in range(1000): print(n, '-' * 50)\nos.write(2, b'native')"
    code, output = run(program)
    assert code == 0
    assert re.findall(r"(\d+) -{50}\n", output) == [str(n) for n in range(1000)]
    assert output.endswith("native")


def test_dropped_lines_are_reported_later() -> None:
    reading, writing = os.pipe()
    program = (
        "import sys; [print('a' * 999) for _ in range(1000)];"
        "print(dropped_lines(), file=sys.stderr)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", UNBLOCKED + program],
        env=environment(), stdin=subprocess.DEVNULL, stdout=writing, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    os.close(writing)
    assert process.stderr is not None
    with process, os.fdopen(reading) as output:
        dropped = int(process.stderr.readline())
        lines = output.read().splitlines()
        assert f"{dropped} lines of standard output were dropped" in process.stderr.read()
    assert len(lines) == 1000 - dropped
    assert dropped > 500


def test_closed_streams_are_not_reused() -> None:
    program = "import os, socket; os._exit(40 + socket.socket().fileno())"
    closed = ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable]
    done = subprocess.run(
        [*closed, UNBLOCKED + program],
        env=environment(), timeout=60,
    )  # fmt: skip
    assert done.returncode > 42
