"""Tokenizers that panic, are slow or make a text far longer: only that document fails."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
from bundles import resealed
from clients import http
from servers import serving
from tokenizers import Regex
from tokenizers.normalizers import NFKC
from tokenizers.pre_tokenizers import Sequence, Split

from aftexport.errors import InputError
from aftserve.batch.answering import OfflineClassifier
from aftserve.errors import DocumentTooLongError
from aftserve.settings import Settings

PANICS = "x" * 40
"""The pattern tries too many ways to split it."""
SAID = "The tokenizer cannot encode the text."


@pytest.fixture(scope="module")
def bundle(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("panics") / "panics.bundle"
    shutil.copytree(bundle_folder, folder)
    tokenizer = tiny_models.byte_tokenizer()
    pattern = Split(Regex(r"(x+x+)+y|[\s\S]"), "isolated")
    tokenizer.pre_tokenizer = Sequence([pattern, tokenizer.pre_tokenizer])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    return resealed(folder)


@pytest.fixture(scope="module")
def served(bundle: Path) -> Iterator[str]:
    with serving(bundle, bundle.with_name("log")) as (address, _):  # which has the panics
        yield address


def test_document_is_refused_as_json(served: str) -> None:
    for path, body in [("/infer", {"text": PANICS}), ("/infer", {"texts": ["a", PANICS]})]:
        answer = http.post(f"{served}{path}", json=body, timeout=60)
        assert answer.status_code == 422
        assert SAID in answer.json()["detail"]
    answer = http.post(
        f"{served}/infer", content=PANICS, headers={"content-type": "text/plain"}, timeout=60
    )
    assert answer.status_code == 422
    assert SAID in answer.json()["detail"]


def test_line_fails_alone(served: str) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in ("a", PANICS, "b"))
    headers = {"content-type": "application/x-ndjson"}
    answer = http.post(f"{served}/infer", content=lines, headers=headers, timeout=60)
    first, failed, last = map(json.loads, answer.text.splitlines())
    assert "label" in first
    assert "label" in last
    assert failed["status"] == 422
    assert SAID in failed["detail"]


def test_offline_document_fails_alone(bundle: Path) -> None:
    offline = OfflineClassifier(Settings.read([str(bundle)]))
    first, failed, last = offline.answer(["a", PANICS, "b"])
    assert first.answer is not None
    assert last.answer is not None
    assert SAID in str(failed.error)


def test_slow_text_ends_inline_tokenizing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aftserve.model.classifier._MAX_INLINE_SECONDS", 0)
    classifier = OfflineClassifier(Settings.read([str(bundle)])).classifier
    assert classifier.inline_characters > 0
    with pytest.raises(InputError, match=SAID):
        classifier.encode_inline(PANICS)
    assert classifier.inline_characters == 0


def test_normalized_text_has_bound(bundle_copy: Path) -> None:
    """The character becomes 18 others, so that 6,000 of them exceed the limit."""
    tokenizer = tiny_models.byte_tokenizer()
    tokenizer.normalizer = NFKC()
    (bundle_copy / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    settings = Settings.read([str(resealed(bundle_copy)), "--max-characters", "100000"])
    classifier = OfflineClassifier(settings).classifier
    assert len(classifier.encode("\ufdfa" * 100)) > 1800
    with pytest.raises(DocumentTooLongError, match="at most 100000 characters after the tok"):
        classifier.encode("\ufdfa" * 99_000)
    assert len(classifier.encode("a" * 99_000)) == 99_000
