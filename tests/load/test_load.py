"""Short runs of ``make load`` and ``make soak``, and faults that they must detect."""

import json
from pathlib import Path

import pytest
from servers import serving

from load import memory, speed
from load.documents import Document, bare_engine, count_ambiguous_pairs, make_documents
from load.parts import Report, stop_under_load
from load.traffic import make_requests, send

# A server that answers each document with the scores of the document before it.
SWAPPING = memory.trimming_server("""
from aftserve.model.classifier import Classifier

classify, last = Classifier.classify, []

def swapping(self, documents, *options, **named):
    answers = last + classify(self, documents, *options, **named)
    last[:] = answers[-1:]
    return answers[: len(documents)]

Classifier.classify = swapping
""")


@pytest.fixture(scope="module")
def documents(bundle_folder: Path) -> list[Document]:
    return make_documents(bare_engine(bundle_folder, 1), 60, shortest=64, longest=16_384)


def test_documents_have_distinct_scores(documents: list[Document]) -> None:
    assert count_ambiguous_pairs(documents) == 0
    assert count_ambiguous_pairs([documents[0], documents[0]]) == 1
    assert min(len(d.ids) for d in documents) == 64
    assert max(len(d.ids) for d in documents) == 16_384


def test_every_client_gets_defined_outcome(
    bundle_folder: Path, documents: list[Document], tmp_path: Path
) -> None:
    """A fifth of the clients disconnect, and a tenth set short deadlines."""
    with serving(bundle_folder, tmp_path / "log") as (address, _):
        results = send(
            address, make_requests(documents, 500, leaving=0.2, hurried=0.1), connections=50
        )
    assert len(results.outcomes) == 500
    assert results.undefined == []
    assert results.states["right"] > 250
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")


def test_swapped_answers_are_counted_wrong(
    bundle_folder: Path, documents: list[Document], tmp_path: Path
) -> None:
    with serving(bundle_folder, tmp_path / "log", program=SWAPPING) as (address, _):
        results = send(address, make_requests(documents, 50), connections=4)
    assert results.states["wrong"] > 40
    assert len(results.undefined) == results.states["wrong"]


def test_only_leaking_server_grows(
    bundle_folder: Path, documents: list[Document], tmp_path: Path
) -> None:
    def grown(leak: int) -> float:
        mib, rounds = memory.growth(
            bundle_folder, documents, tmp_path / "log", rounds=2, requests=150, connections=20,
            leak=leak,
        )  # fmt: skip
        assert len(rounds) == 3
        return mib

    # The leak is 256 MiB per thousand requests; noise over 150 requests is a few MiB.
    assert grown(1 << 18) > 128
    assert grown(0) < 64


def test_stop_under_load_loses_no_request(
    bundle_folder: Path, documents: list[Document], tmp_path: Path
) -> None:
    stopped = stop_under_load(bundle_folder, documents, tmp_path / "log", after=200, connections=50)
    assert stopped.exit_status == 0
    assert stopped.lost == []
    assert stopped.results.states["right"] > stopped.answered_after > 0
    assert stopped.results.states["wrong"] == 0


def test_engine_server_and_contenders_answer_alike(
    bundle_folder: Path, checkpoint_file: Path, documents: list[Document], tmp_path: Path
) -> None:
    engine = bare_engine(bundle_folder, 1)
    with (
        serving(bundle_folder, tmp_path / "log") as (address, _),
        speed.contender(["fastapi_server"], checkpoint_file, 1, tmp_path / "other") as other,
    ):
        ways = {"engine": speed.by_engine(engine), "aftserve": speed.over_http(address, 8)}
        ways["fastapi"] = speed.over_http(other, 8)
        speeds = speed.compare(ways, documents[:12], rounds=2)
        served, bare = speed.overhead_seconds(address, engine, documents[0], blocks=1, repeats=3)
    for found in speeds.values():
        assert found.wrong == 0
        assert len(found.rounds) == 2
        assert len(found.seconds) == 24
        assert found.p99_seconds >= min(found.seconds) > 0
    assert served > 0
    assert bare > 0


def test_report_marks_values_outside_bounds(tmp_path: Path) -> None:
    report = Report({"requests": 3})
    report.shown("size", 5, "MiB")
    report.at_most("errors", 0, 0, "")
    report.at_least("ratio", 0.95, 0.9, "")
    assert report.passed
    report.at_least("ratio", 0.85, 0.9, "")
    assert not report.passed
    report.write(tmp_path / "new" / "report.json")
    content = json.loads((tmp_path / "new" / "report.json").read_text("utf-8"))
    assert [row["within"] for row in content["rows"]] == [None, True, True, False]
    assert content["conditions"]["requests"] == 3
