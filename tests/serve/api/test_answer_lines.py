"""The lines of a streamed answer, without a server."""

import json
import math
from itertools import chain
from typing import Any

import pytest
from served_heads import TAGGER, answer_of

from aftexport.heads import FeatureExtraction
from aftexport.heads.token_classification import TokenLabels
from aftserve.api.document_answers import answer_lines
from aftserve.model.documents import DocumentAnswer


def lines_of(answer: DocumentAnswer, deadline: float = math.inf) -> list[dict[str, Any]]:
    lines = list(answer_lines(answer, deadline))
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("tokens", [1, 4096, 4097, 10_000])
def test_parts_are_whole_answer(tokens: int) -> None:
    answer = answer_of(TAGGER, tokens)
    first, *parts, end = lines_of(answer)
    assert first["tokens_used"] == tokens
    assert end == {"complete": True, "lines": 1 + len(parts)}
    labels = [part for part in parts if "labels" in part]
    assert [part["start_token"] for part in labels] == list(range(0, tokens, 4096))
    whole = json.loads(answer.complete().model_dump_json(exclude_none=True))["heads"]["head"]
    for field in ("labels", "scores"):
        assert [*chain.from_iterable(part[field] for part in labels)] == whole[field]
    assert [*chain.from_iterable(part.get("spans", ()) for part in parts)] == whole["spans"]


def test_wide_vectors_make_short_lines() -> None:
    head = FeatureExtraction(dimensions=768, per_token=True)
    _, *parts, _ = lines_of(answer_of(head, 50))
    assert [len(part["vectors"]) for part in parts] == [21, 21, 8]
    assert max(len(part["vectors"]) * 768 for part in parts) <= 1 << 14


def test_tokens_count_from_document_start() -> None:
    cut, whole = answer_of(TAGGER, 5000, first=700), answer_of(TAGGER, 5000)
    assert [part.get("start_token") for part in lines_of(cut)[1:-1] if "labels" in part] == [
        700, 4796
    ]  # fmt: skip
    spans = (one.tokens.all_spans("head") for one in (cut, whole))
    for ours, theirs in zip(*spans, strict=True):
        assert ours.start_token == theirs.start_token + 700
        assert ours.end_token == theirs.end_token + 700


def test_deadline_ends_answer_with_problem() -> None:
    first, problem = lines_of(answer_of(TAGGER, 10_000), deadline=-math.inf)
    assert first["tokens_used"] == 10_000
    assert problem["status"] == 504
    assert "deadline" in problem["detail"]


def test_spans_are_found_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All labels of a long document would take much memory, only to be dropped."""
    answer = answer_of(TAGGER, 20_000)
    complete = answer.complete().heads
    assert complete is not None
    expected = complete["head"].spans

    def fail(*_: object) -> None:
        raise AssertionError("expected no answers for tokens")

    monkeypatch.setattr(TokenLabels, "answer", fail)
    spans = tuple(answer.tokens.all_spans("head"))
    assert spans == expected
    assert len(spans) > 2000
