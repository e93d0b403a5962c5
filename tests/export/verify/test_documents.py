import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from aftexport.bundle.bundle import Bundle
from aftexport.errors import UsageError
from aftexport.verify.documents import random_documents, read_documents


def test_inputs_are_named_by_line(bundle_folder: Path, tmp_path: Path) -> None:
    """Texts and ids become inputs."""
    bundle = Bundle.open(bundle_folder)
    lines = ['{"text": "an invoice", "label": "invoice"}', "", '{"input_ids": [1, 2, 3]}']
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    found = read_documents(tmp_path / "docs.jsonl", bundle.manifest, bundle.tokenizer())
    expected = tiny_models.byte_tokenizer().encode("an invoice").ids
    assert found["document 1"]["input_ids"].tolist() == [expected]
    assert found["document 3"]["input_ids"].tolist() == [[1, 2, 3]]
    assert found["document 3"]["lengths"].tolist() == [3]


def test_other_fields_are_ignored(bundle_folder: Path, tmp_path: Path) -> None:
    """A model without extra inputs has no use for ``inputs``, which may be any field of a user."""
    bundle = Bundle.open(bundle_folder)
    (tmp_path / "docs.jsonl").write_text('{"text": "an invoice", "inputs": "raw text"}')
    found = read_documents(tmp_path / "docs.jsonl", bundle.manifest, bundle.tokenizer())
    assert list(found) == ["document 1"]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_like_json_lines(
    mark: str, ending: str, bundle_folder: Path, tmp_path: Path
) -> None:
    bundle = Bundle.open(bundle_folder)
    texts = ["a line\u2028separator", "the next\x85line", "another"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    content = mark + "".join(line + ending for line in lines)
    (tmp_path / "docs.jsonl").write_bytes(content.encode())
    found = read_documents(tmp_path / "docs.jsonl", bundle.manifest, bundle.tokenizer())
    expected = [tiny_models.byte_tokenizer().encode(text).ids for text in texts]
    assert [inputs["input_ids"][0].tolist() for inputs in found.values()] == expected


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("not json", "line 1"),
        ("[" * 100_000, "line 1"),
        ("[1, 2]", "expected a JSON object"),
        ('{"text": 3}', "text must be a string, got int"),
        ('{"document": "a"}', "expected text or input_ids"),
        ('{"input_ids": []}', "no tokens"),
        ('{"input_ids": [true]}', "must be a list of whole numbers"),
        ('{"input_ids": "ab"}', "must be a list of whole numbers"),
        ('{"input_ids": [-1]}', "token ids must be from 0"),
        (json.dumps({"input_ids": [tiny_models.VOCABULARY]}), "token ids must be from 0"),
        (json.dumps({"input_ids": [1] * 9}), "expected at most 8 tokens, got 9"),
        ("", "no documents"),
    ],
)
def test_unusable_line_is_named(line: str, why: str, bundle_folder: Path, tmp_path: Path) -> None:
    bundle = Bundle.open(bundle_folder)
    manifest = bundle.manifest.model_copy(update={"max_tokens": 8})
    (tmp_path / "docs.jsonl").write_text(line)
    with pytest.raises(UsageError, match=why):
        read_documents(tmp_path / "docs.jsonl", manifest, bundle.tokenizer())


def test_a_text_needs_a_tokenizer(bundle_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": "words"}')
    with pytest.raises(UsageError, match="no tokenizer"):
        read_documents(tmp_path / "docs.jsonl", Bundle.open(bundle_folder).manifest, None)


def test_random_documents_are_reproducible(bundle_folder: Path) -> None:
    manifest = Bundle.open(bundle_folder).manifest
    first, again = (random_documents([5, 9], manifest) for _ in range(2))
    assert [inputs["input_ids"].shape for inputs in first.values()] == [(1, 5), (1, 9)]
    np.testing.assert_array_equal(
        first["9 random tokens"]["input_ids"], again["9 random tokens"]["input_ids"]
    )
    with pytest.raises(UsageError, match="--lengths must be at most"):
        random_documents([9], manifest.model_copy(update={"max_tokens": 8}))
