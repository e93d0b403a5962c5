"""Outputs per token go to their sinks block by block, as soon as they are computed."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from token_models import (
    Array,
    AttendedTopicAndTags,
    Chunks,
    Encoded,
    Outputs,
    Tagger,
    TopicAndTags,
    document,
)
from torch import Tensor

from aftexport.chunked.runner import ChunkedModel
from aftexport.errors import EngineError, StorageError, UsageError

TOKENS, CHUNK_TOKENS = 100, 32
COUNT = 4


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(TopicAndTags(), tmp_path_factory.mktemp("chunks"))


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    return Chunks(Tagger(), tmp_path_factory.mktemp("tagger"))


def test_sink_gets_each_row_once(chunks: Chunks) -> None:
    model, ids, blocks = chunks.model(CHUNK_TOKENS), document(TOKENS), list[Array]()
    whole = model.run(ids)
    rest = model.run(ids, sinks={"tags": blocks.append})
    assert rest.keys() == {"topic"}
    assert [block.shape for block in blocks] == [(1, 25, 9)] * COUNT
    assert np.array_equal(np.concatenate(blocks, 1), whole["tags"])
    assert np.array_equal(rest["topic"], whole["topic"])


def test_blocks_arrive_between_parts(chunks: Chunks) -> None:
    blocks: list[Array] = []
    parts = chunks.model(CHUNK_TOKENS).parts(document(TOKENS), sinks={"tags": blocks.append})
    arrived = [len(blocks) for _ in parts]
    assert arrived[-COUNT:] == [1, 2, 3, 4]
    assert not any(arrived[:-COUNT])


def test_cancelled_run_hands_over_no_more(chunks: Chunks) -> None:
    ids, before, after = document(TOKENS), list[Array](), list[Array]()
    model = chunks.model(CHUNK_TOKENS)
    parts = model.parts(ids, sinks={"tags": before.append})
    while len(before) < 2:
        next(parts)
    parts.close()
    model.run(ids, sinks={"tags": after.append})
    assert len(before) == 2
    assert len(after) == COUNT
    assert all(map(np.array_equal, before, after[:2]))


def test_error_of_sink_ends_run(chunks: Chunks) -> None:
    """An error of the caller's own file is not one of the values between layers."""

    def fail(rows: Array) -> None:
        raise BrokenPipeError("the reader left")

    with pytest.raises(BrokenPipeError, match="the reader left"):
        chunks.model(CHUNK_TOKENS).run(document(TOKENS), sinks={"tags": fail})


def test_spill_error_is_storage_error(chunks: Chunks, tmp_path: Path) -> None:
    model = ChunkedModel(chunks.path, chunks.plan, threads=1, folder=tmp_path / "missing")
    with pytest.raises(StorageError, match="cannot be stored"):
        model.run(document(TOKENS))


def test_sink_of_document_output_is_refused(chunks: Chunks) -> None:
    with pytest.raises(UsageError, match=r"per token \(tags\), got one for topic"):
        chunks.model().run(document(TOKENS), sinks={"topic": print})


@pytest.mark.parametrize("module", [Tagger, TopicAndTags, AttendedTopicAndTags])
def test_parts_with_tokens_are_counted(module: Callable[[], Encoded], tmp_path: Path) -> None:
    chunks = Chunks(module(), tmp_path)
    for tokens in (20, TOKENS):
        model = chunks.model(CHUNK_TOKENS)
        stops = sum(1 for _ in model.parts(document(tokens)))
        assert model.count(tokens) == stops + 1


def test_unused_attention_runs_for_first_chunk(tmp_path: Path) -> None:
    """Only the first row of the pooling attention is needed, and the others are not computed."""
    chunks = Chunks(AttendedTopicAndTags(), tmp_path)
    assert set(chunks.plan.pooled.values()) == {"first"}
    assert not chunks.plan.tokens_use_last_stage
    # Three stages summarize and apply the chunks, the last applies one; pool, tokens, and the end.
    assert chunks.model(CHUNK_TOKENS).count(TOKENS) == 3 * COUNT + 2 * COUNT + 1 + 1 + COUNT + 1


def test_tagger_has_no_document_graphs(tagger: Chunks) -> None:
    assert tagger.plan.pooled == {}
    assert tagger.plan.documents == ()
    assert tagger.plan.tokens == {"tags": 9}


class Repeated(Tagger):
    """Sixteen copies of each token, which no product computes."""

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        return {"copies": torch.cat([x] * 16, -1)}


def test_token_bytes_include_output_width(tagger: Chunks, tmp_path: Path) -> None:
    copies = Chunks(Repeated(), tmp_path).plan
    assert copies.tokens == {"copies": 256}
    assert copies.token_bytes >= 2 * 4 * 256 > tagger.plan.token_bytes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": {"tags": 8}}, r"tags \[1, 25, 8\] as in the manifest, got \[1, 25, 9\]"),
        ({"tokens": {"other": 9}}, r"other \[1, 25, 9\] as in the manifest, got none"),
        ({"documents": ("other",)}, "expected the output other as in the manifest, got none"),
        ({"pooled": {}, "documents": ()}, None),
    ],
)
def test_plan_of_other_outputs_is_refused(
    chunks: Chunks, changes: dict[str, object], reason: str | None
) -> None:
    plan = chunks.plan.model_copy(update=changes)
    model = ChunkedModel(chunks.path, plan, threads=1, chunk_tokens=CHUNK_TOKENS)
    if reason is None:
        assert model.run(document(TOKENS)).keys() == {"tags"}
        return
    with pytest.raises(EngineError, match=reason):
        model.run(document(TOKENS))


def test_missing_rows_are_refused(chunks: Chunks) -> None:
    """A plan that applies the last stage to one chunk only lacks the rows of the others."""
    first_only = dict.fromkeys(chunks.plan.pooled, "first")
    plan = chunks.plan.model_copy(update={"tokens_use_last_stage": False, "pooled": first_only})
    model = ChunkedModel(chunks.path, plan, threads=1, chunk_tokens=CHUNK_TOKENS)
    with pytest.raises(EngineError, match="Expected 50 rows of a value between layers, got 25"):
        model.run(document(TOKENS))


def test_evidence_beside_outputs_per_token(chunks: Chunks) -> None:
    assert chunks.plan.evidence
    model, ids = chunks.model(CHUNK_TOKENS), document(TOKENS)
    found = model.run(ids, evidence=True)
    assert found.keys() == {"topic", "tags", "evidence"}
    assert found["evidence"].shape == (1, TOKENS)
    without = model.run(ids)
    assert all(np.array_equal(found[name], without[name]) for name in without)
    stops = sum(1 for _ in model.parts(ids, evidence=True))
    assert model.count(TOKENS, evidence=True) == stops + 1
