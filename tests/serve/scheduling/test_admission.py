"""Admission of requests: by the seconds of queued work, and by their deadline."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from altered_bundles import ENDLESS, hanging_bundle
from clients import eventually, head, http, measured_info, metric, raw_connection, response
from servers import serving

import aftplugins

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
    options = (
        "--max-queue-seconds",
        "0",
        "--deadline-seconds",
        "100",
        "--stall-seconds",
        "300",
        "--threads",
        "1",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(aftplugins.DISABLE_VARIABLE, "1")
        with serving(bundle, folder / "log", *options) as (address, _):
            yield address


@pytest.fixture
def busy(address: str) -> Iterator[str]:
    """The same server during a run."""
    body = json.dumps({"input_ids": [[ENDLESS]]}).encode()
    with raw_connection(address) as connection:
        connection.sendall(head(len(body)) + body)
        eventually(lambda: metric(address, "aftserve_running_documents") == 1, "the run begins")
        yield address
    eventually(lambda: metric(address, "aftserve_running_documents") == 0, "the run is stopped")


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
        eventually(lambda: metric(address, "aftserve_running_documents") == 1, "the run begins")
        connection.sendall(lines(*[[5] * 1000] * 6))
        eventually(lambda: metric(address, "aftserve_waiting_documents") == 6, "6 lines wait")
        connection.sendall(lines(*[[5] * 1000] * 6))
        eventually(lambda: metric(address, "aftserve_waiting_documents") == 12, "12 lines wait")
        assert post(address, [[5]]).status_code == 429
    eventually(lambda: metric(address, "aftserve_running_documents") == 0, "the run is stopped")


def test_lines_behind_other_request_get_429(address: str) -> None:
    runs = metric(address, "aftserve_run_documents_count")
    with raw_connection(address) as connection:
        connection.sendall(head(None).replace(b"application/json", LINES))
        connection.sendall(lines([5]))
        eventually(
            lambda: metric(address, "aftserve_run_documents_count") > runs, "the line is run"
        )
        body = json.dumps({"input_ids": [[ENDLESS]]}).encode()
        with raw_connection(address) as other:
            other.sendall(head(len(body)) + body)
            eventually(lambda: metric(address, "aftserve_running_documents") == 1, "the run begins")
            connection.sendall(lines([5], [6]) + b"0\r\n\r\n")
            status, content = response(connection)
    assert status == 200
    found = [json.loads(line) for line in content.splitlines()]
    assert [line.get("status", 200) for line in found] == [200, 429, 429]
    assert "other requests" in found[1]["detail"]
    assert found[1]["retry_after"] >= 1
    eventually(lambda: metric(address, "aftserve_running_documents") == 0, "the run is stopped")


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
    body = json.dumps({"input_ids": [[ENDLESS]]}).encode()
    with raw_connection(slow) as connection:
        connection.sendall(head(len(body)) + body)
        eventually(lambda: metric(slow, "aftserve_running_documents") == 1, "the run begins")
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
