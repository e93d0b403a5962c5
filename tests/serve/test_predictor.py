"""``aftserve.Predictor``: the server's answers in this process."""

import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import input_models
import numpy as np
import pytest
import tiny_models
from altered_bundles import always
from commands import run_python
from rich.console import Console

import aftserve
from aftexport.bundle.bundle import Bundle
from aftexport.errors import BundleError, InputError, ParityError, UsageError
from aftexport.pipeline.export import export
from aftexport.system import console
from aftserve.client import Result
from aftserve.errors import DocumentTooLongError
from aftserve.model.wanted import AnswerOptions
from aftserve.predictor import Predictor

TEXTS = ["an invoice of ten", "a letter", "a long document " * 300, "x"]


@pytest.fixture(scope="module")
def predictor(bundle_folder: Path) -> Iterator[Predictor]:
    with aftserve.Predictor(bundle_folder, threads=1) as loaded:
        yield loaded


def test_wrong_options_are_refused(predictor: Predictor) -> None:
    with pytest.raises(InputError, match="Expected outputs of the model, got 'other'"):
        predictor(TEXTS, outputs=["other"])
    with pytest.raises(UsageError, match="evidence must be at least 0, got -1"):
        predictor("a", evidence=-1)
    with pytest.raises(UsageError, match="evidence_tokens must be at least 1, got 0"):
        predictor("a", evidence=1, evidence_tokens=0)
    with pytest.raises(InputError, match="Add evidence, such as evidence=3"):
        predictor("a", evidence_tokens=64)
    with pytest.raises(UsageError, match="evidence_check must be from 0 to 5, got 6"):
        predictor("a", evidence=1, evidence_check=6)


def test_token_ids_may_be_lists_or_arrays(predictor: Predictor) -> None:
    ids = [[1, 2, 3], [4, 5]]
    expected = predictor(ids)
    for documents in (tuple(map(tuple, ids)), [np.array(one, np.int32) for one in ids]):
        for found, answer in zip(predictor(documents), expected, strict=True):
            assert found.scores == pytest.approx(answer.scores, abs=1e-6)
            assert (found.bundle, found.tokens_total) == (predictor.bundle, answer.tokens_total)


def test_features_equal_lists_of_numbers(feature_bundle: Path) -> None:
    values = np.random.default_rng(0).standard_normal((7, input_models.FEATURES))
    values = values * input_models.SCALE + input_models.MEAN
    with Predictor(feature_bundle, threads=1) as loaded:
        first, second = loaded([values.astype(np.float32), values.tolist()])
        assert first.tokens_total == second.tokens_total == 7
        assert first.scores == pytest.approx(second.scores, abs=1e-5)
        with pytest.raises(InputError, match=r"document 1: .*Send input_features"):
            loaded([values, "a text"])


def test_long_document_runs_in_chunks(bundle_folder: Path, predictor: Predictor) -> None:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    budget = 600.5 * plan.token_bytes / (1 << 20)
    whole = predictor(TEXTS[2])
    with Predictor(bundle_folder, threads=1, memory_budget_mib=budget) as loaded:
        assert loaded(TEXTS[2]).scores == pytest.approx(whole.scores, abs=1e-5)
    with (
        Predictor(
            bundle_folder, threads=1, memory_budget_mib=budget, long_documents="reject"
        ) as loaded,
        pytest.raises(DocumentTooLongError, match=r"document 1: .*at most 600 tokens"),
    ):
        loaded(["a", TEXTS[2]])


def test_failed_document_leaves_the_others(predictor: Predictor) -> None:
    documents: list[Any] = ["a", "", [1, 2.5], {"text": "a"}, np.zeros((2, 2, 2)), b"a", "b"]
    answers = list(predictor.infer_each(documents))
    assert [isinstance(answer, Result) for answer in answers] == [True, *[False] * 5, True]
    said = [str(answer) for answer in answers[1:6]]
    for text, part in zip(
        said, ("no tokens", "integers", "got dict", "float64 [2, 2, 2]", "got bytes"), strict=True
    ):
        assert part in text
    with pytest.raises(InputError, match="document 1: The document has no tokens"):
        predictor(["a", ""])


def test_malformed_rows_leave_the_others(predictor: Predictor, feature_bundle: Path) -> None:
    bad: list[Any] = [[[1, 2], 5], [[1, 2], "ab"], [np.zeros(3), np.zeros((1, 3))], ["a", "b"],
                      [[{}], [1]], [None, [1]], [[], None]]  # fmt: skip
    with Predictor(feature_bundle, threads=1) as of_features:
        good = np.zeros((4, input_models.FEATURES))
        for loaded, one in ((predictor, "a"), (of_features, good)):
            *failed, last = loaded.infer_each([*bad, one])
            assert isinstance(last, Result)
            assert all(isinstance(answer, InputError) for answer in failed)
    assert "a list of numbers for each token, got int for token 1" in str(failed[0])
    assert "got an array [1, 3] for token 1" in str(failed[2])


def test_outcomes_hold_no_contributions(predictor: Predictor) -> None:
    """A number of each token and logit would stay in memory until the answers are given."""
    options = AnswerOptions(explain=["logits"])
    (outcome,) = predictor._outcomes(TEXTS[:1], None, options)
    assert outcome.result is not None
    assert outcome.result.explained
    assert outcome.answer is not None
    assert outcome.answer.explained == ()


@pytest.mark.parametrize("documents", [np.zeros((2, 3), np.int64), b"a", {"text": "a"}])
def test_single_document_must_be_in_a_list(predictor: Predictor, documents: Any) -> None:
    with pytest.raises(TypeError, match="put one document into a list"):
        predictor(documents)


def test_extra_inputs_have_an_effect(tmp_path: Path) -> None:
    export(
        factory="input_models:Late", inputs={"static": f"vector:{input_models.WIDTH}"},
        labels=tiny_models.LABELS, tokenizer="bytes", out=tmp_path / "late.bundle",
    )  # fmt: skip
    fields = [{"static": [value] * input_models.WIDTH} for value in (-2.0, 2.0)]
    with Predictor(tmp_path / "late.bundle", threads=1) as loaded:
        low, high = loaded(["a", "a"], inputs=fields)
        assert low.scores != high.scores
        assert loaded("a", inputs=fields[0]).scores == pytest.approx(low.scores, abs=1e-5)
        alike: list[Any] = [
            (-2.0,) * input_models.WIDTH, [np.float32(-2)] * input_models.WIDTH,
            np.full(input_models.WIDTH, -2, object), np.full(input_models.WIDTH, -2, np.int8),
            (np.array(-2.0),) * input_models.WIDTH,
        ]  # fmt: skip
        for values in alike:
            found = loaded("a", inputs={"static": values})
            assert found.scores == pytest.approx(low.scores, abs=1e-5)
        malformed: list[Any] = [5, None, ["static"], {"static": None}, {"static": {}}, {1: 2},
                                {"static": [[1], [2]]}, fields[0]]  # fmt: skip
        *failed, last = loaded.infer_each(["a"] * len(malformed), inputs=malformed)
        assert isinstance(last, Result)
        assert all(isinstance(one, InputError) for one in failed)
        assert "Expected a mapping from the names of extra inputs to values, got NoneType" in str(
            failed[1]
        )
        with pytest.raises(UsageError, match="got 1 for more documents"):
            loaded(["a", "a"], inputs=fields[:1])
        with pytest.raises(UsageError, match="each of 1 documents, got more"):
            loaded(["a"], inputs=fields)


def test_threads_share_a_predictor(predictor: Predictor) -> None:
    expected = [predictor(text).scores for text in TEXTS]
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        found[number] = [result.scores for result in predictor(TEXTS)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scores in found.values():
        for one, other in zip(scores, expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    assert len(found) == 4


def test_bar_counts_documents(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(console, "_SILENT_SECONDS", 0)
    monkeypatch.setattr(console, "Console", lambda stderr: Console(file=written, width=80))
    predictor(TEXTS)
    assert written.getvalue() == ""  # it is not a terminal
    predictor(TEXTS, progress=True)
    assert re.search(r"4/4 documents", written.getvalue())
    predictor((text for text in TEXTS), progress=False)
    assert written.getvalue().count("4/4") == 1


def test_documents_are_consumed_as_needed(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aftserve.batch.answering._MAX_HELD_DOCUMENTS", 2)
    taken = []

    def documents() -> Iterator[str]:
        for text in TEXTS:
            taken.append(text)
            yield text

    answers = predictor.infer_each(documents())
    next(answers)
    assert len(taken) == 2
    assert len(list(answers)) == 3


def test_closed_predictor_is_refused(bundle_folder: Path) -> None:
    loaded = Predictor(bundle_folder, threads=1)
    loaded.close()
    with pytest.raises(UsageError, match="closed"):
        loaded("a")


def test_folder_of_bundles_is_refused(bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bundle").symlink_to(bundle_folder)
    with pytest.raises(UsageError, match=r"Expected one bundle, got .* Name one, .*a\.bundle"):
        Predictor(tmp_path)


def test_wrong_arguments_are_refused(bundle_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="threads: input should be greater than 0"):
        Predictor(bundle_folder, threads=0)
    with pytest.raises(BundleError, match="absent"):
        Predictor(tmp_path / "absent")


def test_variables_of_the_server_have_no_effect(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AFTSERVE_MAX_TOKENS", "2")
    with Predictor(bundle_folder, threads=1) as loaded:
        assert loaded("more than two tokens").tokens_total > 2


def test_bundle_outside_tolerance_is_refused(bundle_copy: Path) -> None:
    with pytest.raises(ParityError, match="golden"):
        Predictor(always(bundle_copy), threads=1)


def test_import_needs_no_server_and_no_torch(bundle_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'fastapi', 'uvicorn', 'httpx2', 'ray', 'pyarrow', 'onnx_ir',\n"
        "             'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import aftserve\n"
        f"print(aftserve.Predictor({str(bundle_folder)!r}, threads=1)('a').label)"
    )
    outcome = run_python("-c", code, cwd=tmp_path)
    assert outcome.out.strip() in ("invoice", "contract", "letter"), outcome.err
