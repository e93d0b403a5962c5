"""The start of a server on a slow machine: first estimates, then measurements between documents."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import eventually, http, measured_info, metric
from servers import serving

# Every run of whole documents takes long, and has a line in the log.
SLEEPY = (
    "-c",
    """
import sys, time
from aftserve.cli import main
from aftserve.model.classifier import Classifier

classify = Classifier.classify

def sleeping(self, documents, *arguments):
    print("classified", [len(one) for one in documents], flush=True)
    time.sleep(0.6)
    return classify(self, documents, *arguments)

Classifier.classify = sleeping
sys.exit(main())
""",
)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("startup") / "log"


@pytest.fixture(scope="module")
def address(bundle_folder: Path, log: Path) -> Iterator[str]:
    with serving(bundle_folder, log, program=SLEEPY) as (address, _):
        yield address


def test_slow_machine_is_ready_after_one_run(address: str, log: Path) -> None:
    # Other threads write this stream and the address of the server.
    eventually(lambda: "done Comparing" in log.read_text("utf-8"), "the comparison is noted")
    before, _ = log.read_text("utf-8").split("done Comparing")
    assert before.count("classified") == 1
    assert "classified [1]" in before
    assert http.get(f"{address}/readyz").status_code == 200
    assert http.get(f"{address}/info").json()["calibration"]["measuring"] is True


def test_long_document_waits_for_measurement(address: str) -> None:
    """By the first estimate, which grows with the square of the length, it takes 5 minutes."""
    answer = http.post(
        f"{address}/infer",
        json={"input_ids": [[7] * 24]},
        headers={"Deadline-Seconds": "60"},
        timeout=120,
    )
    assert answer.status_code == 200
    assert answer.json()["results"][0]["timings"]["predicted_seconds"] < 60


def test_measurement_goes_on_between_documents(address: str, log: Path) -> None:
    for _ in range(3):
        assert http.post(f"{address}/infer", json={"input_ids": [[7]]}, timeout=120).is_success
    info = measured_info(address)
    eventually(lambda: "measured the costs" in log.read_text("utf-8"), "the end is logged")
    assert info["calibration"]["measuring"] is False
    assert info["calibration"]["in_chunks"]
    assert metric(address, "aftserve_failed_runs_total") == 0
    assert metric(address, "aftserve_stopped_runs_total") == 0
    assert "Traceback" not in log.read_text("utf-8")
