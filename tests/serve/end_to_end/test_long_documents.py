"""Documents over the memory budget: they run in chunks, with short documents between them."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_models
from clients import eventually, head, http, measured_info, metric, raw_connection
from servers import Serve, serving

from aftexport.bundle.bundle import Bundle
from aftexport.parity import TOLERANCES

WHOLE = 100
"""Length of the longest document that runs whole, in tokens."""


@pytest.fixture(scope="module")
def budget(bundle_folder: Path) -> tuple[str, str]:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    return "--memory-budget-mib", str((WHOLE + 0.5) * plan.token_bytes / (1 << 20))


@pytest.fixture(scope="module")
def address(bundle_folder: Path, budget: tuple[str, str], serve: Serve) -> str:
    return serve(bundle_folder, *budget, "--max-queue-seconds", "300")


_PREDICTING = """
import sys
from aftserve.model.costs import CostModel
from aftserve.cli import main

CostModel.single = lambda costs, tokens: {} * tokens
sys.exit(main())
"""
"""A server that predicts a fixed number of seconds per token."""
_SLOW_TURNS = """
import sys, time
from aftserve.cli import main
from aftserve.scheduling.scheduler import Scheduler

end_run = Scheduler._end_run

def slowly(scheduler):
    if scheduler.running_documents:
        time.sleep(2)
    return end_run(scheduler)

Scheduler._end_run = slowly
sys.exit(main())
"""
"""A server that pauses two seconds after every part of a document."""
_SMALL_FILES = (
    "-c",
    """
import resource, sys
from aftserve.cli import main

resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
sys.exit(main())
""",
)
"""A server with a limit on file sizes, which imitates a full disk."""


def document(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(0, tiny_models.VOCABULARY, tokens).tolist()


def post(address: str, ids: list[int], **headers: str) -> httpx.Response:
    return http.post(f"{address}/infer", json={"input_ids": [ids]}, headers=headers, timeout=120)


def answer(address: str, ids: list[int]) -> dict[str, object]:
    response = post(address, ids)
    assert response.status_code == 200, response.text
    (result,) = response.json()["results"]
    return dict(result)


@pytest.mark.parametrize("tokens", [WHOLE, WHOLE + 1, 2 * WHOLE, 3457])
def test_answer_matches_whole_run(address: str, server: str, tokens: int) -> None:
    ids = document(tokens)
    in_chunks, whole = answer(address, ids), answer(server, ids)
    assert in_chunks["scores"] == pytest.approx(whole["scores"], abs=TOLERANCES["fp32"].bound)
    assert in_chunks["label"] == whole["label"]
    fields = [in_chunks[name] for name in ("tokens_total", "tokens_used", "truncated", "policy")]
    assert fields == [tokens, tokens, False, "exact"]


def test_short_documents_run_between_chunks(address: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        long = [pool.submit(answer, address, document(300_000 + i)) for i in range(2)]
        eventually(lambda: metric(address, "aftserve_running_documents") == 1, "the document runs")
        for tokens in range(1, 4):
            assert answer(address, document(tokens))["tokens_used"] == tokens
        assert not any(future.done() for future in long), [f.result() for f in long if f.done()]
        assert [future.result()["tokens_used"] for future in long] == [300_000, 300_001]


def test_disconnect_drops_running_document(address: str) -> None:
    stopped = metric(address, "aftserve_stopped_runs_total")
    body = f'{{"input_ids": [{document(1_000_000)}]}}'.encode()
    with raw_connection(address) as connection:
        connection.sendall(head(len(body)) + body)
        eventually(lambda: metric(address, "aftserve_running_documents") == 1, "the document runs")
    eventually(lambda: metric(address, "aftserve_backlog_seconds") == 0, "the document is dropped")
    eventually(
        lambda: metric(address, "aftserve_stopped_runs_total") == stopped + 1, "the stop is counted"
    )
    assert answer(address, document(7))["tokens_used"] == 7


def test_disconnect_between_parts_is_counted(
    bundle_folder: Path, budget: tuple[str, str], tmp_path: Path
) -> None:
    program = ("-c", _SLOW_TURNS)
    with serving(bundle_folder, tmp_path / "log", *budget, program=program) as (address, _):
        body = f'{{"input_ids": [{document(1_000_000)}]}}'.encode()
        with raw_connection(address) as connection:
            connection.sendall(head(len(body)) + body)
            eventually(
                lambda: metric(address, "aftserve_running_documents") == 1, "the document runs"
            )
            time.sleep(1)  # three times as long as a part takes
        eventually(
            lambda: metric(address, "aftserve_backlog_seconds") == 0, "the document is dropped"
        )
        eventually(
            lambda: metric(address, "aftserve_stopped_runs_total") == 1, "the stop is counted"
        )


def test_unreachable_deadline_refused_before_run(
    bundle_folder: Path, budget: tuple[str, str], tmp_path: Path
) -> None:
    program = ("-c", _PREDICTING.format(1.0))
    with serving(bundle_folder, tmp_path / "log", *budget, program=program) as (address, _):
        response = post(address, document(2 * WHOLE), **{"Deadline-Seconds": "60"})
        assert response.status_code == 413, response.text
        assert "the deadline is in" in response.json()["detail"]
        assert metric(address, "aftserve_run_documents_count") == 0


def test_underestimated_run_stops_at_deadline(
    bundle_folder: Path, budget: tuple[str, str], tmp_path: Path
) -> None:
    program = ("-c", _PREDICTING.format(1e-9))
    with serving(bundle_folder, tmp_path / "log", *budget, program=program) as (address, _):
        # The two take ten seconds on an idle machine; on a busy one they may not have begun.
        long = {"input_ids": [[5] * 1_000_000] * 2}
        deadline = {"Deadline-Seconds": "4"}
        response = http.post(f"{address}/infer", json=long, headers=deadline, timeout=120)
        assert response.status_code == 504, response.text
        eventually(lambda: metric(address, "aftserve_backlog_seconds") == 0, "the run ends")


def test_info_shows_long_document_policy(address: str) -> None:
    info = measured_info(address)
    assert info["limits"]["whole_tokens"] == WHOLE
    assert info["limits"]["long_documents"] == "exact"
    assert info["limits"]["whole_only"] is None
    measured = info["calibration"]["in_chunks"]
    assert [run["tokens"] for run in measured] == [WHOLE, 2 * WHOLE]


@pytest.mark.parametrize("policy", ["head", "tail", "reject"])
def test_policies_cut_or_refuse_document(
    policy: str, bundle_folder: Path, budget: tuple[str, str], server: str, tmp_path: Path
) -> None:
    ids = document(3 * WHOLE)
    arguments = (*budget, "--long-documents", policy)
    with serving(bundle_folder, tmp_path / "log", *arguments) as (address, _):
        if policy == "reject":
            response = post(address, ids)
            assert response.status_code == 413
            detail = response.json()["detail"]
            assert "at most 100 tokens to fit --memory-budget-mib" in detail
            assert "got 300, predicted to take 1 MiB" in detail
            return
        found = answer(address, ids)
        response = http.post(f"{address}/infer?evidence=100", json={"input_ids": [ids]})
        (explained,) = response.json()["results"]
    first = 0 if policy == "head" else 2 * WHOLE
    for span in explained["evidence"]["spans"]:
        assert first <= span["start_token"] < span["end_token"] <= first + WHOLE
    part = ids[:WHOLE] if policy == "head" else ids[-WHOLE:]
    assert found["scores"] == pytest.approx(answer(server, part)["scores"], abs=1e-4)
    fields = [found[name] for name in ("tokens_total", "tokens_used", "truncated", "policy")]
    assert fields == [3 * WHOLE, WHOLE, True, policy]


def test_full_disk_fails_only_long_document(
    bundle_folder: Path, budget: tuple[str, str], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with serving(bundle_folder, log, *budget, program=_SMALL_FILES) as (address, _):
        refused = post(address, document(30_000))
        assert refused.status_code == 507
        assert "cannot be stored" in refused.json()["detail"]
        assert "Traceback" not in log.read_text("utf-8")
        for tokens in (WHOLE, 2 * WHOLE):
            assert post(address, document(tokens)).status_code == 200
