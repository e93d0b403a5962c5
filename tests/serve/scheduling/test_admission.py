"""Admission of requests: by the seconds of queued work, and by their deadline."""

import asyncio
import itertools
import json
import logging
import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
from altered_bundles import ENDLESS, hanging_bundle
from clients import eventually, head, http, measured_info, metric, raw_connection, response
from clocks import replace_time
from grpc_servers import GrpcServer, ids_request, serving_grpc
from queued_jobs import make_bundle
from servers import serving

import aftplugins
from aftexport.engines import RunStoppedError, Stop
from aftexport.errors import EngineError
from aftserve.api.api_keys import make_key
from aftserve.errors import BusyError, DocumentTooLongError, UnavailableError
from aftserve.grpc.wire_types import SERVICE
from aftserve.http.clients import Client
from aftserve.model import costs
from aftserve.model.costs import CostMeasurement, MeasuredRange, Shape
from aftserve.model.load import LoadedModel
from aftserve.scheduling.admission import Admission
from aftserve.scheduling.batching import Backlog
from aftserve.scheduling.scheduler import Scheduler, StalledError

LINES = b"application/x-ndjson"
SLOW = (
    "-c",
    """
import sys
from aftserve.model.costs import CostModel
from aftserve.cli import main

CostModel.single = lambda costs, tokens: 100.0 * tokens
sys.exit(main())
""",
)


@pytest.fixture(scope="module")
def address(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that allows 0 s of queued work; without fused kernels its runs are slow."""
    folder = tmp_path_factory.mktemp("admission")
    bundle = hanging_bundle(Path(shutil.copytree(bundle_folder, folder / "model.bundle")))
    limits = {"max-queue": 0, "deadline": 100, "stall": 300}
    seconds = [f"--{name}-seconds={value}" for name, value in limits.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(aftplugins.DISABLE_VARIABLE, "1")
        with serving(bundle, folder / "log", *seconds, "--threads", "1") as (address, _):
            yield address


def wait_for_runs(address: str, count: int) -> None:
    eventually(lambda: metric(address, "aftserve_running_documents") == count, f"{count} runs")


@contextmanager
def endless_run(address: str) -> Iterator[None]:
    """Keep the engine busy within the block."""
    body = json.dumps({"input_ids": [[ENDLESS]]}).encode()
    with raw_connection(address) as connection:
        connection.sendall(head(len(body)) + body)
        wait_for_runs(address, 1)
        yield


@pytest.fixture
def busy(address: str) -> Iterator[str]:
    """The same server during a run."""
    with endless_run(address):
        yield address
    wait_for_runs(address, 0)


def post(address: str, documents: list[list[int]], **headers: str) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": documents}, headers=headers, timeout=60)


def test_full_queue_gets_429_with_delay(busy: str) -> None:
    answer = post(busy, [[5]])
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "Try again later" in answer.json()["detail"]


def test_full_queue_refuses_before_reading_body(busy: str) -> None:
    with raw_connection(busy) as connection:
        connection.sendall(head(10_000_000))
        status, body = response(connection)
    assert status == 429
    assert b"detail" in body


def lines(*documents: list[int]) -> bytes:
    """Return a chunk of a body, with one line for each document."""
    content = b"".join(json.dumps({"input_ids": ids}).encode() + b"\n" for ids in documents)
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def test_lines_of_one_request_may_wait(address: str) -> None:
    """Lines wait for lines of their own request; other requests are refused meanwhile."""
    with raw_connection(address) as connection:
        connection.sendall(head(None).replace(b"application/json", LINES))
        connection.sendall(lines([ENDLESS]))
        wait_for_runs(address, 1)
        connection.sendall(lines(*[[5] * 1000] * 6))
        eventually(lambda: metric(address, "aftserve_waiting_documents") == 6, "6 lines wait")
        connection.sendall(lines(*[[5] * 1000] * 6))
        eventually(lambda: metric(address, "aftserve_waiting_documents") == 12, "12 lines wait")
        assert post(address, [[5]]).status_code == 429
    wait_for_runs(address, 0)


def test_lines_behind_other_request_get_429(address: str) -> None:
    runs = metric(address, "aftserve_run_documents_count")
    with raw_connection(address) as connection:
        connection.sendall(head(None).replace(b"application/json", LINES))
        connection.sendall(lines([5]))
        eventually(
            lambda: metric(address, "aftserve_run_documents_count") > runs, "the line is run"
        )
        with endless_run(address):
            connection.sendall(lines([5], [6]) + b"0\r\n\r\n")
            status, content = response(connection)
    assert status == 200
    found = [json.loads(line) for line in content.splitlines()]
    assert [line.get("status", 200) for line in found] == [200, 429, 429]
    assert "other requests" in found[1]["detail"]
    assert found[1]["retry_after"] >= 1
    wait_for_runs(address, 0)


def test_empty_queue_admits_request(address: str) -> None:
    assert post(address, [[5]]).status_code == 200


@pytest.fixture(scope="module")
def slow(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that predicts 100 s for each token."""
    folder = tmp_path_factory.mktemp("slow")
    bundle = hanging_bundle(Path(shutil.copytree(bundle_folder, folder / "model.bundle")))
    options = ("--max-queue-seconds", "300", "--stall-seconds", "300")
    with serving(bundle, folder / "log", *options, program=SLOW) as (address, _):
        yield address


def test_work_longer_than_deadline_gets_413(slow: str) -> None:
    runs = metric(slow, "aftserve_run_documents_count")
    answer = post(slow, [[5], [6]], **{"Deadline-Seconds": "150"})
    assert answer.status_code == 413
    assert "2 tokens take 200 s, but the deadline is in 1" in answer.json()["detail"]
    assert metric(slow, "aftserve_run_documents_count") == runs


def test_queue_longer_than_deadline_gets_429(slow: str) -> None:
    with endless_run(slow):
        answer = post(slow, [[5]], **{"Deadline-Seconds": "150"})
    assert answer.status_code == 429
    assert "the deadline is in 1" in answer.json()["detail"]
    assert 1 <= int(answer.headers["retry-after"]) <= 51


@pytest.mark.parametrize("deadline", ["0", "-1", "nan", "inf", "soon", ""])
def test_invalid_deadline_is_refused(deadline: str, address: str) -> None:
    answer = post(address, [[5]], **{"Deadline-Seconds": deadline})
    assert answer.status_code == 422
    assert "Deadline-Seconds" in answer.json()["detail"]


def test_answer_reports_predicted_time(address: str) -> None:
    count = metric(address, "aftserve_actual_to_predicted_ratio_count")
    timings = post(address, [[5] * 100]).json()["results"][0]["timings"]
    assert timings["predicted_seconds"] > 0
    assert metric(address, "aftserve_actual_to_predicted_ratio_count") == count + 1


def test_info_publishes_calibration_and_limits(address: str) -> None:
    info = measured_info(address)
    assert info["limits"]["max_queue_seconds"] == 0
    assert info["limits"]["deadline_seconds"] == 100
    assert info["labels"] == ["invoice", "contract", "letter"]
    lengths = [m["tokens"] for m in info["calibration"]["measurements"] if m["documents"] == 1]
    assert lengths == sorted(lengths)
    assert len(lengths) > 1
    assert all(m["seconds"] > 0 for m in info["calibration"]["measurements"])
    assert info["calibration"]["pace"] > 0


def test_too_many_documents_are_refused(address: str) -> None:
    answer = post(address, [[5]] * 257)
    assert answer.status_code == 413
    assert "257" in answer.json()["detail"]


TOKENS = 1_000_000
"""Length of a document that takes hours by first estimates."""
DEADLINE_SECONDS = 100.0


def make_model(run: Callable[[Stop], None] = lambda stop: None) -> LoadedModel:
    """Return a model with first estimates from one run; a function does its further runs."""

    def measure(shape: Shape, stop: Stop | None) -> None:
        if stop is None:
            time.sleep(0.001)
        else:
            run(stop)

    measurement = CostMeasurement(measure, MeasuredRange(1, 16, 16, batching=False))
    # The first run takes a millisecond: on a busy machine, estimates would be hours, also those
    # by which a run counts as stalled.
    clock = itertools.count(0, 0.001)
    with pytest.MonkeyPatch.context() as patch:
        replace_time(patch, costs, perf_counter=lambda: next(clock))
        measurement.step()
    return make_bundle("model", measurement).model


def make_scheduler(model: LoadedModel, stall_seconds: float = 300.0) -> Scheduler:
    scheduler = Scheduler(budget_tokens=16, stall_seconds=stall_seconds, idle_seconds=math.inf)
    scheduler.measure(model)
    return scheduler


async def admit(
    scheduler: Scheduler, model: LoadedModel, seconds: float = DEADLINE_SECONDS
) -> float:
    deadline = time.monotonic() + seconds
    return await Admission(scheduler, 10.0).admit(model, [TOKENS], deadline, Backlog(), Client(""))


async def served(scheduler: Scheduler, model: LoadedModel) -> float:
    """Admit a document while the scheduler serves."""
    serving = asyncio.create_task(scheduler.serve())
    try:
        return await asyncio.wait_for(admit(scheduler, model), 60)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError, StalledError):
            await serving
        if (run := scheduler._queue.current_run) is not None:
            run.stop.request()  # the engine's thread begins another run before it hears of the end


def is_trusted(model: LoadedModel) -> bool:
    model.slowdown.observe(100.0, 1.0)
    return model.slowdown.value < 1


def failing(stop: Stop) -> None:
    raise EngineError("out of memory", "Use less.")


def stalling(stop: Stop) -> None:
    while not stop.is_requested:
        time.sleep(0.01)
    raise RunStoppedError


def test_measurement_before_deadline_admits_document() -> None:
    model = make_model()
    scheduler = make_scheduler(model)
    assert model.measurement.costs.single(TOKENS) > DEADLINE_SECONDS
    assert asyncio.run(served(scheduler, model)) < DEADLINE_SECONDS
    assert is_trusted(model)


def test_deadline_before_measurement_gets_429() -> None:
    model = make_model()
    with pytest.raises(BusyError, match="is not measured yet"):
        asyncio.run(admit(make_scheduler(model), model, seconds=2.0))


def test_complete_measurement_gets_413() -> None:
    model = make_model(lambda stop: time.sleep(0.01))
    model.measurement.measure_all()
    with pytest.raises(DocumentTooLongError):
        asyncio.run(admit(make_scheduler(model), model, seconds=1.0))


@pytest.mark.slow
@pytest.mark.parametrize(("run", "stall_seconds"), [(failing, 300.0), (stalling, 4.0)])
def test_failed_measurement_gets_no_413(
    run: Callable[[Stop], None], stall_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(run)
    scheduler = make_scheduler(model, stall_seconds)
    with caplog.at_level(logging.INFO, "aftserve.scheduler"):
        assert asyncio.run(served(scheduler, model)) > DEADLINE_SECONDS
    assert not is_trusted(model)
    assert "first estimates stay" in caplog.text
    assert "measured the costs" not in caplog.text


def test_replaced_model_admits_waiting_document() -> None:
    async def scenario() -> float:
        model = make_model()
        scheduler = make_scheduler(model)
        waiting = asyncio.create_task(admit(scheduler, model))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        scheduler.forget(model)
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(scenario()) > DEADLINE_SECONDS


def test_stalled_scheduler_gets_503() -> None:
    """The measurement neither ends nor can be stopped."""
    is_over = False

    def endless(stop: Stop) -> None:
        while not is_over:
            time.sleep(0.01)

    model = make_model(endless)
    try:
        with pytest.raises(UnavailableError, match="stopped working"):
            asyncio.run(served(make_scheduler(model, stall_seconds=0.05), model))
    finally:
        is_over = True


_CONNECTIONS = 4


@dataclass(frozen=True)
class Shared:
    """A server, and its keys by their owners."""

    server: GrpcServer
    keys: dict[str, str]

    def post(self, owner: str, content: bytes, kind: str = "application/json") -> httpx.Response:
        headers = {"X-API-Key": self.keys[owner], "Content-Type": kind}
        url = f"{self.server.http}/infer"
        return httpx.post(url, content=content, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def shared(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """A server whose runs take milliseconds, and whose queue holds a tenth of a second of work."""
    folder = tmp_path_factory.mktemp("shares")
    bundle = hanging_bundle(Path(shutil.copytree(bundle_folder, folder / "model.bundle")))
    made = {
        owner: make_key(owner, None, tokens=tokens)
        for owner, tokens in {"greedy": None, "light": None, "limited": "6/hour"}.items()
    }
    file = folder / "keys.toml"
    file.write_text("\n\n".join(section for _, section in made.values()))
    options = ("--api-keys", str(file), "--max-queue-seconds", "0.1", "--threads", "1")
    with serving_grpc(bundle, folder / "log", *options) as server:
        yield Shared(server, {owner: key for owner, (key, _) in made.items()})


@pytest.fixture
def flooded(shared: Shared) -> Iterator[Counter[int]]:
    """The same server under one key's load; yields the statuses of that key's requests."""
    statuses, ended = Counter[int](), threading.Event()
    body = json.dumps({"input_ids": [[5] * 20] * 16}).encode()

    def flood() -> None:
        while not ended.is_set():
            statuses[shared.post("greedy", body).status_code] += 1

    with ThreadPoolExecutor(_CONNECTIONS) as pool:
        floods = [pool.submit(flood) for _ in range(_CONNECTIONS)]
        try:
            eventually(lambda: statuses[429], "the key's share of the queue is full")
            yield statuses
        finally:
            ended.set()
    for one in floods:
        one.result()


def test_light_key_is_answered_beside_greedy(shared: Shared, flooded: Counter[int]) -> None:
    document = json.dumps({"input_ids": [[7] * 20]}).encode()
    line = json.dumps({"input_ids": [7] * 20}).encode() + b"\n"
    request = ids_request("model", [7] * 20).SerializeToString()
    metadata = [("x-api-key", shared.keys["light"])]
    with grpc.insecure_channel(shared.server.grpc) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for _ in range(4):
            refused = flooded[429]
            assert shared.post("light", document).status_code == 200
            lines = shared.post("light", line * 2, "application/x-ndjson")
            assert [json.loads(one).get("status") for one in lines.text.splitlines()] == [None] * 2
            assert infer(request, metadata=metadata, timeout=60)
            eventually(lambda: flooded[429] > refused, "the greedy key is refused again")  # noqa: B023
    assert flooded[200]


def test_tokens_of_key_are_limited(shared: Shared) -> None:
    document = json.dumps({"input_ids": [[7] * 4]}).encode()
    assert shared.post("limited", document).status_code == 200
    answer = shared.post("limited", document)
    assert answer.status_code == 429
    assert 0 < int(answer.headers["retry-after"]) <= 1200
    assert "6 per 1 hour in tokens" in answer.json()["detail"]
    assert shared.post("light", document).status_code == 200
    request = ids_request("model", [7] * 4).SerializeToString()
    with grpc.insecure_channel(shared.server.grpc) as channel:
        with pytest.raises(grpc.RpcError) as refusal:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(
                request, metadata=[("x-api-key", shared.keys["limited"])], timeout=60
            )
        assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
