"""Answers to many documents without a server, and failures of single documents."""

import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from altered_bundles import always
from bundles import of_links
from hypothesis import given
from hypothesis import strategies as st
from load.documents import Document, bare_engine, make_documents

from aftexport.bundle.bundle import Bundle
from aftexport.errors import EngineError, InputError, ParityError
from aftexport.parity import TOLERANCES
from aftserve.batch import answering
from aftserve.batch.answering import OfflineClassifier, Outcome, shared_runs
from aftserve.model.answers import Answer
from aftserve.model.classifier import Classifier
from aftserve.model.costs import MIN_BATCH_GAIN, CostModel, Measurement
from aftserve.scheduling.batching import MAX_LENGTH_RATIO
from aftserve.settings import Settings
from aftserve.types import Tokens

BOUND = TOLERANCES["fp32"].bound


@pytest.fixture(scope="module")
def offline(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> OfflineClassifier:
    bundle = of_links(bundle_folder, "cache", tmp_path_factory.mktemp("links"))
    loaded = OfflineClassifier(Settings.read([str(bundle)]))
    loaded._costs_of([1024] * answering._MIN_MEASURED_DOCUMENTS)
    return loaded


@pytest.fixture(scope="module")
def documents(bundle_folder: Path) -> list[Document]:
    return make_documents(bare_engine(bundle_folder, 1), 80, shortest=1, longest=8000)


def assert_right(outcome: Outcome, document: Document) -> None:
    assert outcome.answer is not None, outcome.error
    assert document.is_answered_by(outcome.answer.heads["logits"].scores)
    assert outcome.tokens_total == outcome.tokens_used == len(document.ids)


def test_batch_answers_equal_single_answers(
    offline: OfflineClassifier, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    classify = Classifier.classify

    def counting(self: Classifier, batch: Sequence[Tokens], **options: Any) -> list[Answer]:
        sizes.append(len(batch))
        return classify(self, batch, **options)

    monkeypatch.setattr(Classifier, "classify", counting)
    for limit in (answering._MAX_HELD_TOKENS, 1000):
        monkeypatch.setattr(answering, "_MAX_HELD_TOKENS", limit)
        outcomes = offline.answer([document.text for document in documents])
        for outcome, document in zip(outcomes, documents, strict=True):
            assert_right(outcome, document)
    assert sum(sizes) == 2 * len(documents)


@pytest.mark.parametrize(("count", "longest"), [(255, 0), (256, 64)])
def test_many_documents_measure_their_lengths(
    count: int, longest: int, offline: OfflineClassifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only many documents measure the costs, and up to the lengths that may share runs."""
    monkeypatch.setattr(offline, "_measured_tokens", 0)
    monkeypatch.setattr(offline, "_costs", offline._model.measurement.costs)
    costs = offline._costs_of([20] * count + [5000])
    shared = [one.tokens for one in costs.measurements if one.documents > 1]
    assert max(shared, default=0) == longest


def test_invalid_document_does_not_affect_others(
    offline: OfflineClassifier, documents: list[Document]
) -> None:
    unreadable = InputError("The file is not UTF-8 at byte 3.", "Convert it.")
    given = [documents[0].text, "", documents[1].text, unreadable, documents[2].text]
    outcomes = list(offline.answer(given))
    for place, document in zip((0, 2, 4), documents, strict=False):
        assert_right(outcomes[place], document)
    assert outcomes[1].answer is None
    assert str(outcomes[1].error) == "The document has no tokens. Send some text."
    assert outcomes[3].error is unreadable


def test_engine_failure_affects_one_document(
    offline: OfflineClassifier, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = Classifier.classify
    bad = documents[5].ids.tolist()

    def failing(self: Classifier, batch: Sequence[Tokens], **options: Any) -> list[Answer]:
        if any(ids.tolist() == bad for ids in batch):
            raise EngineError("The engine fails.", "Send another document.")
        return classify(self, batch, **options)

    monkeypatch.setattr(Classifier, "classify", failing)
    outcomes = offline.answer([document.text for document in documents])
    for outcome, document in zip(outcomes, documents, strict=True):
        if document is documents[5]:
            assert outcome.answer is None
            assert "The engine fails." in str(outcome.error)
            assert outcome.tokens_total == len(bad)
        else:
            assert_right(outcome, document)


@pytest.mark.parametrize("policy", ["exact", "reject", "head", "tail"])
def test_policy_applies_over_memory_budget(
    policy: str, bundle_folder: Path, documents: list[Document]
) -> None:
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    budget, whole = str(600.5 * plan.token_bytes / (1 << 20)), bare_engine(bundle_folder, 1)
    words = [str(bundle_folder), "--memory-budget-mib", budget, "--long-documents", policy]
    outcomes = OfflineClassifier(Settings.read(words)).answer([d.text for d in documents])
    assert any(len(document.ids) > 600 for document in documents)
    for outcome, document in zip(outcomes, documents, strict=True):
        if len(document.ids) <= 600 or policy == "exact":
            assert_right(outcome, document)
        elif policy == "reject":
            assert "at most 600 tokens" in str(outcome.error)
        else:
            ids = document.ids[:600] if policy == "head" else document.ids[-600:]
            assert (outcome.tokens_used, outcome.tokens_total) == (600, len(document.ids))
            (expected,) = whole.classify([ids])
            assert outcome.answer is not None
            scores, wanted = (a.heads["logits"].scores for a in (outcome.answer, expected))
            assert scores == pytest.approx(wanted, abs=BOUND)


def test_bundle_outside_tolerance_is_refused(bundle_copy: Path) -> None:
    with pytest.raises(ParityError, match="golden"):
        OfflineClassifier(Settings.read([str(always(bundle_copy))]))


def test_answering_holds_one_text(offline: OfflineClassifier, documents: list[Document]) -> None:
    alive: list[weakref.ref[Text]] = []

    def read() -> Iterator[str]:
        for document in documents[:10]:
            assert sum(text() is not None for text in alive) <= 1
            text = Text(document.text)
            alive.append(weakref.ref(text))
            yield text
            del text

    for outcome, document in zip(offline.answer(read()), documents, strict=False):
        assert_right(outcome, document)
    assert len(alive) == 10


class Text(str):
    """A string that can be referred to weakly."""

    __slots__ = ("__weakref__",)


def test_failed_spill_affects_long_documents_only(
    bundle_folder: Path, documents: list[Document], tmp_path: Path
) -> None:
    (tmp_path / "spill").mkdir()
    plan = Bundle.open(bundle_folder).manifest.chunked
    assert plan is not None
    budget, whole = str(600.5 * plan.token_bytes / (1 << 20)), 600
    words = ["--memory-budget-mib", budget, "--spill", str(tmp_path / "spill")]
    offline = OfflineClassifier(Settings.read([str(bundle_folder), *words]))
    (tmp_path / "spill").rmdir()
    outcomes = offline.answer([document.text for document in documents])
    assert any(len(document.ids) > whole for document in documents)
    for outcome, document in zip(outcomes, documents, strict=True):
        if len(document.ids) > whole:
            assert "--spill" in str(outcome.error)
        else:
            assert_right(outcome, document)


BUDGET = 2048
COSTS = CostModel(
    [
        *(Measurement(1, tokens, 0.001 + tokens * 1e-5) for tokens in (1, 64, 1024, 16_384)),
        *(Measurement(n, t, 0.001 + n * t * 1e-5) for n in (2, 4, 8) for t in (1, 64, 256)),
    ]
)  # fmt: skip


@given(st.lists(st.integers(1, 3000), max_size=80), st.booleans())
def test_every_document_is_in_one_run(lengths: list[int], masks_padding: bool) -> None:
    """Shared runs keep the limits on lengths and tokens, and cost less than single runs."""
    runs = list(shared_runs(lengths, COSTS, budget_tokens=BUDGET, masks_padding=masks_padding))
    assert sorted(index for run in runs for index in run) == list(range(len(lengths)))
    for run in filter(lambda run: len(run) > 1, runs):
        longest, shortest = max(lengths[i] for i in run), min(lengths[i] for i in run)
        assert longest <= (MAX_LENGTH_RATIO if masks_padding else 1) * shortest
        assert len(run) * longest <= BUDGET
        single = sum(COSTS.single(lengths[i]) for i in run)
        assert COSTS.batch(len(run), longest) < (1 - MIN_BATCH_GAIN) * single


def test_cheaper_documents_share_runs() -> None:
    assert list(shared_runs([5] * 20, COSTS, budget_tokens=BUDGET, masks_padding=True)) == [
        list(range(8)), list(range(8, 16)), list(range(16, 20))
    ]  # fmt: skip
    runs = shared_runs([9000, 5, 9000, 5], COSTS, budget_tokens=BUDGET, masks_padding=True)
    assert list(runs) == [[1, 3], [0], [2]]
