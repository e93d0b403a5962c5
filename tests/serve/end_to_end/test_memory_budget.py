"""The memory of a server whose model cannot run in chunks, read from outside."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from altered_bundles import softmax_bundle
from clients import http
from memory import NEEDS_PROC, resident_mib
from servers import serving

TOKENS = 8190
BESIDE_MIB = 3
"""Memory of the request itself: its body, its ids and the answer."""


@contextmanager
def watched(process: int) -> Iterator[list[float]]:
    """Yield a list that ends with the growth of a process's memory during the block, in MiB."""
    start, growth, ended = resident_mib(process), [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            growth[0] = max(growth[0], resident_mib(process) - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        ended.set()
        thread.join()


@NEEDS_PROC
@pytest.mark.parametrize(
    ("budget", "status"),
    [(64, 413), pytest.param(512, 413, marks=pytest.mark.slow),
     pytest.param(3072, 200, marks=pytest.mark.slow)],
)  # fmt: skip
def test_runs_stay_within_budget(
    budget: int, status: int, bundle_folder: Path, tmp_path: Path
) -> None:
    """A refusal names the needed memory, the budget and the longest document that fits."""
    bundle = softmax_bundle(Path(shutil.copytree(bundle_folder, tmp_path / "model.bundle")))
    options = ("--memory-budget-mib", str(budget), "--threads", "2")
    with serving(bundle, tmp_path / "log", *options, measured=True) as (address, process):
        limit = http.get(f"{address}/info").json()["limits"]["max_tokens"]
        http.post(f"{address}/infer", json={"input_ids": [[5] * 16]})
        with watched(process.pid) as growth:
            ids = {"input_ids": [[5] * TOKENS]}
            answer = http.post(f"{address}/infer", json=ids, timeout=120)
            assert answer.status_code == status
            fitting = [min(limit, TOKENS) // part for part in (4, 3, 2, 1, 1)]
            together = {"input_ids": [[5] * tokens for tokens in (*fitting, *[300] * 20)]}
            assert http.post(f"{address}/infer", json=together, timeout=120).status_code == 200
            lines = "".join(json.dumps({"input_ids": [5] * n}) + "\n" for n in (*fitting, TOKENS))
            streamed = http.post(
                f"{address}/infer",
                content=lines,
                headers={"Content-Type": "application/x-ndjson"},
                timeout=120,
            )
            assert len(streamed.text.splitlines()) == len(fitting) + 1
        assert growth[0] <= budget + BESIDE_MIB
        assert process.poll() is None
        if status == 413:
            detail = answer.json()["detail"]
            assert f"at most {limit} tokens" in detail
            assert f"--memory-budget-mib {budget}, got {TOKENS}, predicted to take" in detail
