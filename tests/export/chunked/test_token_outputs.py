"""Outputs per token in chunks equal those of the whole document, in bounded memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sampling import part_of
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
from torch import Tensor, nn

from aftexport.bench.benchmark import peak_mib
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.token_flow import NotChunkable
from aftexport.errors import EngineError, StorageError, UsageError
from aftexport.nn.config import RECURRENT_LAYERS

MECHANISMS = ("aft_conv", "aft_local", "aft_simple", "efficient_attention", "fastformer",
              "linear_attention")  # fmt: skip


@pytest.fixture(
    scope="module",
    params=part_of([(m, c) for m in MECHANISMS for c in (False, True)], lambda p: (str(p), {*p})),
    ids=lambda p: f"{'causal ' if p[1] else ''}{p[0]}",
)
def mechanism(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chunks:
    name, causal = request.param
    return Chunks(TopicAndTags(name, causal=causal), tmp_path_factory.mktemp("chunks"))


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize(("tokens", "chunk_tokens"), [(1, 4), (7, 3), (4_097, 1_000)])
def test_tokens_equal_whole_document(mechanism: Chunks, tokens: int, chunk_tokens: int) -> None:
    mechanism.check(document(tokens), chunk_tokens)


Compute = Callable[[Any, Tensor, Tensor], Outputs]
"""The outputs of a model, from the encoded tokens and the lengths."""


class EarlyLayer(TopicAndTags):
    """Keeps the tokens after the first layer."""

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        self.early = self.encoder.layers[0](x, lengths)
        return self.encoder.layers[1](self.early, lengths)


class OnlyEmbeddings(TopicAndTags):
    """No attention."""

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.embedding(input_ids)


class WideTags(TopicAndTags):
    """Tags of the document beside each token."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.tags = torch.nn.Linear(2 * dim, 9)


def early_tags(m: Any, x: Tensor, lengths: Tensor) -> Outputs:
    vectors = torch.nn.functional.normalize(x, dim=-1)
    topic = m.topic(m.pooling(x, lengths))
    return {"early": m.tags(m.early), "vectors": vectors, "topic": topic}


def gated_by_document(m: Any, x: Tensor, lengths: Tensor) -> Outputs:
    pooled = m.pooling(x, lengths)
    return {"topic": m.topic(pooled), "tags": m.tags(x * torch.sigmoid(pooled)[:, None])}


def beside_document(m: Any, x: Tensor, lengths: Tensor) -> Outputs:
    pooled = m.pooling(x, lengths)[:, None].expand(-1, x.shape[1], -1)
    return {"tags": m.tags(torch.cat([x, pooled], 2))}


def filled_by_document(m: Any, x: Tensor, lengths: Tensor) -> Outputs:
    zeros = torch.zeros(x.shape[0], x.shape[1], 1)
    return {"tags": m.tags(zeros + m.pooling(x, lengths)[:, None])}


def below_maximum(m: Any, x: Tensor, lengths: Tensor) -> Outputs:
    padding = torch.arange(x.shape[1]) >= lengths[:, None]
    maximum = x.masked_fill(padding[..., None], -1e9).amax(1, keepdim=True)
    return {"maximum": maximum[:, 0], "below": x - maximum}


def with_outputs(base: type[Encoded], compute: Compute) -> type[Encoded]:
    return type(base.__name__, (base,), {"outputs": compute})


MODELS: dict[str, type[Encoded]] = {
    "attended": AttendedTopicAndTags,
    "only embeddings": OnlyEmbeddings,
    "early tags and vectors": with_outputs(EarlyLayer, early_tags),
    "hidden layers": with_outputs(EarlyLayer, lambda m, x, _: {"first": m.early, "second": x}),
    "gated by document": with_outputs(TopicAndTags, gated_by_document),
    "beside document": with_outputs(WideTags, beside_document),
    "filled by document": with_outputs(TopicAndTags, filled_by_document),
    "pointers to tokens": with_outputs(
        TopicAndTags, lambda m, x, lengths: {"pointer": x @ m.pooling(x, lengths)[:, :, None]}
    ),
    "relative to first": with_outputs(
        TopicAndTags, lambda m, x, _: {"tags": m.tags(x - x[:, 0].unsqueeze(1))}
    ),
    "below maximum": with_outputs(TopicAndTags, below_maximum),
}


@pytest.mark.table(keep=0.25)
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize("name", MODELS)
def test_any_place_of_output_equals_whole(name: str, tokens: int, tmp_path: Path) -> None:
    Chunks(MODELS[name]("aft_local"), tmp_path).check(document(tokens), 31)


class Centered(Tagger):
    """Attends to tokens less their mean."""

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.encoder(x - x.mean(1, keepdim=True), lengths)


class SoftmaxAttended(Tagger):
    """Positions, which are refused first, and a softmax attention."""

    def encoded(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids) + torch.arange(input_ids.shape[1])[:, None] / 10
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def pooled_twice(m: Any, x: Tensor, _: Tensor) -> Outputs:
    return {"tags": m.tags((x - x.mean(1, keepdim=True)).amax(1))}


def normalized_over_tokens(m: Any, x: Tensor, _: Tensor) -> Outputs:
    return {"tags": torch.nn.functional.normalize(x, dim=1)}


def scaled_by_length(m: Any, x: Tensor, _: Tensor) -> Outputs:
    return {"tags": m.tags(x) / x.shape[1]}


def one_number(m: Any, x: Tensor, _: Tensor) -> Outputs:
    """Return one number per token without an axis for it."""
    return {"tags": m.tags(x)[..., 0]}


@pytest.mark.table(keep=0.4, by=lambda module, reason: reason)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Centered, "attends to tokens that depend on the pooled document"),
        (with_outputs(Tagger, pooled_twice), "brings the pooled document back to its tokens"),
        (with_outputs(Tagger, normalized_over_tokens), "not known to act on each token"),
        (with_outputs(Tagger, scaled_by_length), "scales tokens by the document's length"),
        (SoftmaxAttended, "its softmax attention needs the whole document; .* uses the positions"),
        (with_outputs(Tagger, one_number), "not known to act on each token"),
    ],
)
def test_obstacle_to_tokens_is_named(module: type[Encoded], reason: str, tmp_path: Path) -> None:
    with pytest.raises(NotChunkable, match=reason):
        Chunks(module(), tmp_path)


class VectorsAndWeightedTopic(TopicAndTags):
    """The vectors of the tokens are an output, and a softmax pools them."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.score = torch.nn.Linear(dim, 1)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        weights = self.score(x).softmax(1)
        return {"vectors": x, "topic": self.topic((weights * x).sum(1))}


@pytest.mark.parametrize(
    "kind",
    [
        with_outputs(TopicAndTags, lambda m, x, _: {"embedding": x.mean(1)}),
        VectorsAndWeightedTopic,
    ],
)
def test_outputs_may_be_pooled_values(kind: type[TopicAndTags], tmp_path: Path) -> None:
    """The shapes of outputs are those of the graph's outputs, not of its inner values."""
    Chunks(kind("aft_simple"), tmp_path).check(document(50), 20)


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


def test_token_bytes_include_output_width(tagger: Chunks, tmp_path: Path) -> None:
    """Sixteen copies of each token are an output that no product computes."""
    module = with_outputs(Tagger, lambda m, x, _: {"copies": torch.cat([x] * 16, -1)})
    copies = Chunks(module(), tmp_path).plan
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


LONG_MECHANISMS = ("aft_conv", "aft_local", "aft_simple", "efficient_attention", "fastformer",
              "linear_attention", *RECURRENT_LAYERS)  # fmt: skip
MILLION = 1_000_000
LABELS_MIB = MILLION * 9 * 4 / (1 << 20)


@pytest.mark.table(keep=0.03, by=lambda mechanism, causal: mechanism in RECURRENT_LAYERS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", LONG_MECHANISMS)
def test_65537_tokens_equal_whole(mechanism: str, causal: bool, tmp_path: Path) -> None:
    Chunks(TopicAndTags(mechanism, causal=causal), tmp_path).check(document(65_537))


def test_million_labels_within_budget(tmp_path: Path) -> None:
    """Beside the joined labels, memory does not depend on the length."""
    chunks = Chunks(Tagger(), tmp_path)
    model, ids = chunks.model(), document(MILLION)
    count = [0]

    def add(rows: Array) -> None:
        count[0] += rows.shape[1]

    model.run(ids[:100_000])
    in_blocks = peak_mib(lambda: model.run(ids, sinks={"tags": add}))
    joined = peak_mib(lambda: model.run(ids))
    if in_blocks is None or joined is None:
        pytest.skip("the kernel keeps no count of the highest resident memory")
    assert count == [MILLION]
    assert in_blocks < 32
    assert joined < 32 + LABELS_MIB < 512


class Wide(Encoded):
    """A vector of 768 numbers for each token."""

    def build(self, dim: int) -> None:
        self.wide = nn.Linear(dim, 768)

    def outputs(self, x: Tensor, lengths: Tensor) -> Outputs:
        return {"vectors": self.wide(x)}


def test_wide_output_streams_to_file(tmp_path: Path) -> None:
    chunks, path = Chunks(Wide(), tmp_path), tmp_path / "vectors"
    model, ids = chunks.model(), document(65_537)

    def write(tokens: int) -> None:
        with path.open("wb") as file:
            model.run(ids[:tokens], sinks={"vectors": lambda rows: file.write(rows.tobytes())})

    write(20_000)
    short = peak_mib(lambda: write(20_000))
    # The smaller of two: garbage of other threads may add some MiB to one.
    long = [peak for _ in range(2) if (peak := peak_mib(lambda: write(ids.size))) is not None]
    if short is None or not long:
        pytest.skip("the kernel keeps no count of the highest resident memory")
    assert min(long) < short + 16  # the file has 192 MiB
    found = np.memmap(path, np.float32, "r", shape=(ids.size, 768))
    truth = chunks.expected(ids)["vectors"][0]
    assert np.abs(found - truth).max() <= 1e-4 * np.abs(truth).max()
    path.unlink()
