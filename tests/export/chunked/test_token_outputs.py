"""Outputs per token of a document in chunks equal those of the whole document."""

from pathlib import Path

import pytest
import token_models
import torch
from sampling import part_of
from token_models import Chunks, Encoded, Tagger, TopicAndTags, document

from aftexport.chunked.token_kinds import NotChunkable

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


class EarlyTagsAndVectors(TopicAndTags):
    """Labels from the first layer, the last layer's vectors, and labels of the document."""

    def encoded(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        self.early = self.encoder.layers[0](x, lengths)
        return self.encoder.layers[1](self.early, lengths)

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        vectors = torch.nn.functional.normalize(x, dim=-1)
        topic = self.topic(self.pooling(x, lengths))
        return {"early": self.tags(self.early), "vectors": vectors, "topic": topic}


class HiddenLayers(EarlyTagsAndVectors):
    """Both layers as they are."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"first": self.early, "second": x}


class OnlyEmbeddings(TopicAndTags):
    """No attention."""

    def encoded(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.embedding(input_ids)


class GatedByDocument(TopicAndTags):
    """Multiplies each token by a gate of the document."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        pooled = self.pooling(x, lengths)
        tags = self.tags(x * torch.sigmoid(pooled)[:, None])
        return {"topic": self.topic(pooled), "tags": tags}


class BesideDocument(TopicAndTags):
    """Repeats the document beside each token."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.tags = torch.nn.Linear(2 * dim, 9)

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        pooled = self.pooling(x, lengths)[:, None].expand(-1, x.shape[1], -1)
        return {"tags": self.tags(torch.cat([x, pooled], 2))}


class FilledByDocument(TopicAndTags):
    """Adds the document to a zero for each token."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        zeros = torch.zeros(x.shape[0], x.shape[1], 1)
        return {"tags": self.tags(zeros + self.pooling(x, lengths)[:, None])}


class PointsToTokens(TopicAndTags):
    """Multiplies each token by the document's vector."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"pointer": x @ self.pooling(x, lengths)[:, :, None]}


class RelativeToFirst(TopicAndTags):
    """Subtracts the first token."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"tags": self.tags(x - x[:, 0].unsqueeze(1))}


class BelowMaximum(TopicAndTags):
    """Returns the maximum over the tokens, and subtracts it from them."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        maximum = x.masked_fill(padding[..., None], -1e9).amax(1, keepdim=True)
        return {"maximum": maximum[:, 0], "below": x - maximum}


@pytest.mark.table(keep=0.5)
@pytest.mark.parametrize("tokens", [1, 100])
@pytest.mark.parametrize(
    "module",
    [
        token_models.AttendedTopicAndTags, EarlyTagsAndVectors, HiddenLayers, OnlyEmbeddings,
        GatedByDocument, BesideDocument, FilledByDocument, PointsToTokens, RelativeToFirst,
        BelowMaximum,
    ],
)  # fmt: skip
def test_any_place_of_output_equals_whole(
    module: type[Encoded], tokens: int, tmp_path: Path
) -> None:
    Chunks(module("aft_local"), tmp_path).check(document(tokens), 31)


class Centered(Tagger):
    """Attends to tokens less their mean."""

    def encoded(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        return self.encoder(x - x.mean(1, keepdim=True), lengths)


class PooledTwice(Tagger):
    """Pools tokens less their mean."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"tags": self.tags((x - x.mean(1, keepdim=True)).amax(1))}


class NormalizedOverTokens(Tagger):
    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"tags": torch.nn.functional.normalize(x, dim=1)}


class ScaledByLength(Tagger):
    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"tags": self.tags(x) / x.shape[1]}


class SoftmaxAttended(Tagger):
    """Positions, which are refused first, and a softmax attention."""

    def encoded(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids) + torch.arange(input_ids.shape[1])[:, None] / 10
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


class OneNumber(Tagger):
    """One number per token without an axis for it."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"tags": self.tags(x)[..., 0]}


@pytest.mark.table(keep=0.4, by=lambda module, reason: reason)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Centered, "attends to tokens that depend on the pooled document"),
        (PooledTwice, "brings the pooled document back to its tokens"),
        (NormalizedOverTokens, "not known to act on each token"),
        (ScaledByLength, "scales tokens by the document's length"),
        (SoftmaxAttended, "its softmax attention needs the whole document; .* uses the positions"),
        (OneNumber, "not known to act on each token"),
    ],
)
def test_obstacle_to_tokens_is_named(module: type[Encoded], reason: str, tmp_path: Path) -> None:
    with pytest.raises(NotChunkable, match=reason):
        Chunks(module(), tmp_path)


class MeanVector(TopicAndTags):
    """The mean over the tokens is an output itself."""

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        return {"embedding": x.mean(1)}


class VectorsAndWeightedTopic(TopicAndTags):
    """The vectors of the tokens are an output, and a softmax pools them."""

    def build(self, dim: int) -> None:
        super().build(dim)
        self.score = torch.nn.Linear(dim, 1)

    def outputs(self, x: torch.Tensor, lengths: torch.Tensor) -> token_models.Outputs:
        weights = self.score(x).softmax(1)
        return {"vectors": x, "topic": self.topic((weights * x).sum(1))}


@pytest.mark.parametrize("kind", [MeanVector, VectorsAndWeightedTopic])
def test_outputs_may_be_pooled_values(kind: type[TopicAndTags], tmp_path: Path) -> None:
    """The shapes of outputs are those of the graph's outputs, not of its inner values."""
    Chunks(kind("aft_simple"), tmp_path).check(document(50), 20)
