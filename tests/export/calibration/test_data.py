"""Labels of each form are read, and errors name the line."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.calibration.data import (
    heads_to_calibrate,
    notes_on,
    read_labelled_documents,
    truths_by_head,
)
from aftexport.errors import UsageError
from aftexport.heads import (
    AnyHead,
    BinaryClassification,
    MultiLabelClassification,
    Regression,
    SingleLabelClassification,
)
from aftexport.heads.regression import Value

KIND = SingleLabelClassification(labels=("invoice", "letter"))
FLAGS = MultiLabelClassification(labels=("urgent", "legal", "spam"), thresholds=(0.5, 0.5, 0.5))
AGE = Regression(values=(Value(name="age"),))
IDS = {"input_ids": [1, 2]}


def read(folder: Path, manifest: Manifest, *lines: dict[str, Any] | str) -> Any:
    path = folder / "labelled.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), "utf-8")
    return read_labelled_documents(path, manifest, tiny_models.byte_tokenizer())


@pytest.fixture(scope="module")
def plain(bundle_folder: Path) -> Manifest:
    return Bundle.open(bundle_folder).manifest


def with_heads(manifest: Manifest, **heads: AnyHead) -> Manifest:
    return manifest.model_copy(update={"heads": heads})


def test_every_form_is_read(plain: Manifest, tmp_path: Path) -> None:
    given = {"text": "ab", "label": "letter"}
    (first,) = read(tmp_path, with_heads(plain, logits=KIND), given)
    labels = {**IDS, "labels": ["spam", "urgent"]}
    (second,) = read(tmp_path, with_heads(plain, logits=FLAGS), labels)
    assert (first.line, first.tokens.tolist(), first.truths["logits"].tolist()) == (1, [64, 65], 1)
    assert second.truths["logits"].tolist() == [1, 0, 1]
    spam = BinaryClassification(labels=("ham", "spam"))
    (binary,) = read(tmp_path, with_heads(plain, logits=spam), {**IDS, "label": "spam"})
    assert binary.truths["logits"].tolist() == 1


def test_features_are_read_normalized(feature_bundle: Path, tmp_path: Path) -> None:
    manifest = Bundle.open(feature_bundle).manifest
    line = {"input_features": [[1.5, -2.0, 0.0, 10.0], [2.0, 2.0, 1.0, 13.0]], "label": "letter"}
    (one,) = read(tmp_path, manifest, line)
    assert one.tokens.tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_heads_are_labelled_by_name(plain: Manifest, tmp_path: Path) -> None:
    manifest = with_heads(plain, kind=KIND, age=AGE, flags=FLAGS)
    assert list(heads_to_calibrate(manifest)) == ["kind", "flags"]
    both, one = read(
        tmp_path,
        manifest,
        {**IDS, "labels": {"kind": "letter", "flags": []}},
        "",
        {**IDS, "labels": {"flags": ["legal"]}},
    )
    assert {name: truth.tolist() for name, truth in both.truths.items()} == {
        "kind": 1,
        "flags": [0, 0, 0],
    }
    assert (one.line, list(one.truths)) == (3, ["flags"])
    truths = {name: found.tolist() for name, found in truths_by_head([both, one]).items()}
    assert truths == {"kind": [1], "flags": [[0, 0, 0], [0, 1, 0]]}


@pytest.mark.parametrize(
    ("heads", "line", "problem"),
    [
        ({"a": KIND}, {"text": "a"}, "exactly one of label and labels"),
        ({"a": KIND}, {"text": "a", "label": "letter", "labels": []}, "exactly one of label"),
        ({"a": KIND}, {"text": "a", "label": "spam"}, "one of 'invoice', 'letter', got 'spam'"),
        ({"a": KIND}, {"text": "a", "label": 3}, "one of 'invoice', 'letter', got '3'"),
        ({"a": KIND}, {"text": "a", "label": ["letter"]}, "one of 'invoice'"),
        ({"a": KIND}, {"text": "a", "labels": ["letter"]}, "expected label for single_label"),
        ({"a": FLAGS}, {"text": "a", "label": "spam"}, "expected labels for multi_label"),
        ({"a": FLAGS}, {"text": "a", "labels": "spam"}, "expected a list of labels, got str"),
        ({"a": FLAGS}, {"text": "a", "labels": ["spam", {}]}, "one of 'urgent', 'legal', 'spam'"),
        ({"a": KIND, "b": FLAGS}, {"text": "a", "label": "letter"}, "labels by head, for 'a', 'b'"),
        ({"a": KIND}, {"text": "a", "labels": {"c": "letter"}}, "labels of 'a', got 'c'"),
        ({"a": KIND}, {"text": "a", "labels": {}}, "at least one head"),
        ({"a": KIND}, {"label": "letter"}, "expected text or input_ids"),
        ({"a": KIND}, {"input_ids": [300], "label": "letter"}, "token ids must be from 0 to 299"),
        ({"a": KIND}, {"text": "", "label": "letter"}, "at least one token"),
        ({"a": KIND}, "{", "line 2"),
        ({"a": KIND}, "[]", "expected a JSON object"),
    ],
)
def test_errors_name_the_line(
    heads: dict[str, AnyHead], line: Any, problem: str, plain: Manifest, tmp_path: Path
) -> None:
    names = {name: head.names[0] for name, head in heads.items()}
    good = {name: [label] if heads[name] is FLAGS else label for name, label in names.items()}
    with pytest.raises(UsageError) as caught:
        read(tmp_path, with_heads(plain, **heads), {"text": "a", "labels": good}, line)
    assert "line 2: " in caught.value.problem
    assert problem in caught.value.problem


def test_notes_are_on_repeats_and_heads(plain: Manifest, tmp_path: Path) -> None:
    manifest = with_heads(plain, kind=KIND, age=AGE, flags=FLAGS)
    lines = [{"text": text, "labels": {"kind": "letter"}} for text in ("a", "b", "a", "aa", "a")]
    repeats, unlabelled = notes_on(read(tmp_path, manifest, *lines), manifest)
    assert "got 2 that repeat" in repeats
    assert "The head 'flags' gets no calibration" in unlabelled
    only = with_heads(plain, kind=KIND)
    assert notes_on(read(tmp_path, only, *lines[:2]), only) == []


def test_other_heads_are_refused(plain: Manifest, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"got logits \(regression\)"):
        read(tmp_path, with_heads(plain, logits=AGE), {**IDS, "label": "a"})
    with pytest.raises(UsageError, match="has no documents"):
        read(tmp_path, plain, "")
