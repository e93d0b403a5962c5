"""Many documents at a time, without a server: each is answered as alone, and fails alone."""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from biased_model import always
from bundles import of_links
from load.documents import Document, bare_engine, make_documents

from aftexport.bundle.bundle import Bundle
from aftexport.errors import EngineError, InputError, ParityError
from aftexport.parity import TOLERANCES
from aftserve.batch import answering
from aftserve.batch.answering import OfflineClassifier, Outcome
from aftserve.batch.documents import texts_of
from aftserve.errors import DocumentTooLongError
from aftserve.model.classifier import Answer, Classifier
from aftserve.settings import Settings
from aftserve.types import Tokens

BOUND = TOLERANCES["fp32"].bound


@pytest.fixture(scope="module")
def offline(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> OfflineClassifier:
    bundle = of_links(bundle_folder, "cache", tmp_path_factory.mktemp("links"))
    return OfflineClassifier(Settings.read([str(bundle)]))


@pytest.fixture(scope="module")
def documents(bundle_folder: Path) -> list[Document]:
    return make_documents(bare_engine(bundle_folder, 1), 80, shortest=1, longest=8000)


def assert_right(outcome: Outcome, document: Document) -> None:
    assert outcome.answer is not None, outcome.error
    assert document.is_answered_by(outcome.answer.scores)
    assert outcome.tokens_total == outcome.tokens_used == len(document.ids)


def test_each_is_answered_as_alone(
    offline: OfflineClassifier, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    classify = Classifier.classify

    def counting(self: Classifier, batch: Sequence[Tokens]) -> list[Answer]:
        sizes.append(len(batch))
        return classify(self, batch)

    monkeypatch.setattr(Classifier, "classify", counting)
    for most in (answering._MAX_HELD_TOKENS, 1000):
        monkeypatch.setattr(answering, "_MAX_HELD_TOKENS", most)
        outcomes = offline.answer([document.text for document in documents])
        for outcome, document in zip(outcomes, documents, strict=True):
            assert_right(outcome, document)
    assert sum(sizes) == 2 * len(documents)


def test_one_that_cannot_be_answered_has_its_error_and_others_their_answers(
    offline: OfflineClassifier, documents: list[Document]
) -> None:
    unread = InputError("The file is not UTF-8 at byte 3.", "Convert it.")
    given = [documents[0].text, "", documents[1].text, unread, documents[2].text]
    outcomes = offline.answer(given)
    for place, document in zip((0, 2, 4), documents, strict=False):
        assert_right(outcomes[place], document)
    assert outcomes[1].answer is None
    assert outcomes[1].error == "The document has no tokens. Send some text."
    assert outcomes[3].error == str(unread)


def test_one_that_the_engine_fails_on_fails_alone(
    offline: OfflineClassifier, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    classify = Classifier.classify
    bad = documents[5].ids.tolist()

    def failing(self: Classifier, batch: Sequence[Tokens]) -> list[Answer]:
        if any(ids.tolist() == bad for ids in batch):
            raise EngineError("It fails.", "Nothing helps.")
        return classify(self, batch)

    monkeypatch.setattr(Classifier, "classify", failing)
    outcomes = offline.answer([document.text for document in documents])
    for outcome, document in zip(outcomes, documents, strict=True):
        if document is documents[5]:
            assert outcome.answer is None
            assert "It fails." in (outcome.error or "")
            assert outcome.tokens_total == len(bad)
        else:
            assert_right(outcome, document)


@pytest.mark.parametrize("policy", ["exact", "reject", "head", "tail"])
def test_what_is_over_the_memory_budget_is_treated_as_the_policy_says(
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
            assert "at most 600 tokens" in (outcome.error or "")
        else:
            ids = document.ids[:600] if policy == "head" else document.ids[-600:]
            assert (outcome.tokens_used, outcome.tokens_total) == (600, len(document.ids))
            (expected,) = whole.classify([ids])
            assert outcome.answer is not None
            assert outcome.answer.scores == pytest.approx(expected.scores, abs=BOUND)


def test_a_bundle_outside_its_bound_answers_nothing(bundle_copy: Path) -> None:
    with pytest.raises(ParityError, match="golden"):
        OfflineClassifier(Settings.read([str(always(bundle_copy))]))


def test_no_more_texts_are_held_than_one(
    offline: OfflineClassifier, documents: list[Document]
) -> None:
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
    """One that can be seen to go."""

    __slots__ = ("__weakref__",)


def test_of_a_file_with_more_than_a_text_may_have_no_more_is_read(tmp_path: Path) -> None:
    files = {"long": "\N{GRINNING FACE}" * 10, "too long": "a" * 41}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    block = pa.table({"path": [os.fsencode(tmp_path / name) for name in files]})
    long, too_long = texts_of(block, 10)
    assert long == files["long"]
    assert isinstance(too_long, DocumentTooLongError)


def test_one_that_finds_no_space_between_layers_fails_alone(
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
            assert "--spill" in (outcome.error or "")
        else:
            assert_right(outcome, document)
