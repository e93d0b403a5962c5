from pathlib import Path

import pytest

from benchmarks.documents import debian, run
from benchmarks.documents.__main__ import verdict
from benchmarks.documents.contenders import BAG, LOCAL, POOLINGS, SOFTMAX, WINDOWS, recipe_of
from benchmarks.documents.run import Job, measure_served, run_job
from benchmarks.documents.texts import Data
from train_whole_documents import Recipe

RECIPE = Recipe(seconds=0.5, min_tokens=64, tokens_per_step=512, checks=2)
WINDOW_NAMES = {"window_max", "window_mean", "window_learned", "first", "ends"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "FOLDER", tmp_path)
    monkeypatch.setattr(run, "VALIDATION", {512: 40, 2_048: 4})
    monkeypatch.setattr(run, "CHECKED", {128: 4})
    monkeypatch.setattr(run, "MAX_DOCUMENTS", 6)
    monkeypatch.setattr(debian, "FOLDER", tmp_path / "absent")


def job(task: str, model: str, *lengths: int) -> Job:
    return Job(task, model, 0, recipe_of(model, RECIPE), POOLINGS[task], lengths)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["contains", "conflict"])
def test_job_judges_every_contender(task: str, data: Data) -> None:
    for model, names in ((WINDOWS, WINDOW_NAMES), (BAG, {BAG})):
        rows = run_job(job(task, model, 512, 1_024), data)
        assert {(row["contender"], row["tokens"]) for row in rows} == {
            (name, tokens) for name in names for tokens in (512, 1_024)
        }
        assert all(0 <= row["f1"] <= 1 and row["documents"] == 6 for row in rows)
    served = measure_served(job(task, WINDOWS, 512, 1_024), data, threads=1)
    assert {row["contender"] for row in served} == {"window_max", "first"}
    assert all(row["seconds"] > 0 for row in served)


def test_long_documents_have_fewer_tests() -> None:
    assert [run.test_count(tokens) for tokens in (512, 1 << 19, 1 << 21)] == [6, 2, 1]


def test_softmax_is_for_short_documents() -> None:
    own = job("contains", SOFTMAX, 512, 8_192, 32_768)
    assert run.lengths_of(own) == [512, 8_192]
    assert max(tokens for _, tokens in own.recipe.stages) == 2_048


def status(whole: float, windows: float, first: float) -> int:
    f1 = {LOCAL: whole, "window_max": windows, "first": first}
    rows = [{"mechanism": "contains", "tokens": 8_192, "contender": name, "f1": value}
            for name, value in f1.items()]  # fmt: skip
    return verdict(rows)[0]


def test_verdict_fails_without_gain() -> None:
    assert status(whole=0.7, windows=0.75, first=0.4) == 0
    assert status(whole=0.55, windows=0.55, first=0.4) == 1
    assert status(whole=0.7, windows=0.85, first=0.4) == 1
