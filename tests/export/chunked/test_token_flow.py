"""A computation that a chunk cannot do is refused, and the error names it."""

import onnx_ir as ir
import pytest
import tiny_models
import torch
from sampling import any_case
from torch import Tensor, nn

from aftexport.capture.capture import capture
from aftexport.chunked.softmaxes import rewrite_as_means
from aftexport.chunked.token_flow import Kind, NotChunkable, classify
from aftexport.lowering.to_onnx import lower
from aftexport.nn import LAYERS, AftSimple, ClassifierConfig, DocumentClassifier


class Positions(nn.Module):
    """Learns an embedding of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny_models.VOCABULARY, 8)
        self.positions = nn.Embedding(4096, 8)
        self.attention = AftSimple(8)
        self.head = nn.Linear(8, 3)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.attention(self.embed(input_ids), lengths).sum(1))


class ByLength(Positions):
    """Divides each token by the length."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) / ids.shape[1]


class Mixing(Positions):
    """Adds up the tokens so far."""

    def embed(self, ids: Tensor) -> Tensor:
        return self.embedding(ids).cumsum(1)


class Centered(Positions):
    """Subtracts the mean of the document."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x - x.sum(1, keepdim=True)


class Masked(Positions):
    """Weighs each token by whether it is there."""

    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return torch.arange(ids.shape[1]) < lengths[:, None]

    def weights(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.mask(ids, lengths).float()

    def attended(self, lengths: Tensor) -> Tensor:
        return lengths

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        weights = self.weights(input_ids, lengths)[..., None]
        x = self.attention(self.embedding(input_ids) * weights, self.attended(lengths))
        return self.head((x * weights).sum(1) / weights.sum(1).clamp(min=1))


class MaskedPositions(Masked):
    def weights(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return super().weights(ids, lengths) * self.positions.weight[: ids.shape[1], 0]


class MaskedShare(Masked):
    def weights(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return super().weights(ids, lengths) / lengths[:, None]


class FirstThousands(Masked):
    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return super().mask(ids, lengths.clamp(max=5000))


class FirstHalf(Masked):
    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return super().mask(ids, lengths // 2)


class AllButTheFirst(Masked):
    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return torch.arange(1, ids.shape[1] + 1) < lengths[:, None]


class Last(Masked):
    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return torch.arange(ids.shape[1]) >= lengths[:, None] - 1


class AttendsToThousands(Masked):
    def attended(self, lengths: Tensor) -> Tensor:
        return lengths.clamp(max=5000)


class LeastLength(Masked):
    def attended(self, lengths: Tensor) -> Tensor:
        return lengths.clamp(min=1)


class OfPadding(Masked):
    def mask(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return ~(torch.arange(ids.shape[1]) >= lengths[:, None].clamp(1, ids.shape[1]))


class Filled(Masked):
    def weights(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return torch.zeros(ids.shape).masked_fill(self.mask(ids, lengths), 1)


class HeadsOverTokens(Positions):
    """Adds the sum over the tokens to each head."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).reshape(*ids.shape, 2, 4)
        return (x + x.sum(1, keepdim=True)).flatten(2)


class HeadsByPosition(Positions):
    """Scales each head by a number for its position."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).reshape(*ids.shape, 2, 4)
        return (x * self.positions.weight[: ids.shape[1], :2, None]).flatten(2)


class NormedHeads(Positions):
    """Divides each head by its norm."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).reshape(*ids.shape, 2, 4)
        return (x / x.square().sum(-1, keepdim=True).sqrt()).flatten(2)


class FlatSoftmax(Positions):
    """Pools by a softmax of one number for each token, over the last axis of ``[B, T]``."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head((x * self.score(x).squeeze(-1).softmax(-1)[..., None]).sum(1))


class RepeatedMean(Positions):
    """Adds the sum of the document to each head, once more for each token."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.attention(self.embedding(input_ids), lengths)
        heads = x.reshape(*input_ids.shape, 2, 4)
        pooled = x.sum(1).reshape(-1, 1, 2, 4).expand(-1, input_ids.shape[1], -1, -1)
        return self.head((heads + pooled.cumsum(1)).flatten(2).sum(1))


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ByLength, "scales tokens by the document's length"),
        (Mixing, "CumSum .* is not known to act on each token alone"),
        (HeadsOverTokens, "ReduceSum .* is not known to act on each token alone"),
        (FlatSoftmax, "Softmax .* is not known to act on each token alone"),
        (HeadsByPosition, "uses the positions of tokens"),
        (Centered, "attends to tokens that depend on the pooled document"),
        (RepeatedMean, "brings the pooled document back to its tokens"),
        (MaskedPositions, "uses the positions of tokens"),
        (MaskedShare, "scales tokens by the document's length"),
        (FirstThousands, "uses the positions of tokens"),
        (FirstHalf, "uses the positions of tokens"),
        (AllButTheFirst, "scales tokens by the document's length"),
        (Last, "uses the positions of tokens"),
        (AttendsToThousands, "attends to other tokens than the document has"),
    ],
)
def test_obstacle_to_chunks_is_named(module: type[nn.Module], reason: str) -> None:
    with pytest.raises(NotChunkable, match=reason):
        classify(ir.from_proto(lower(capture(module(), max_tokens=4096))).graph)


@pytest.mark.table(keep=0.34, by=any_case)
@pytest.mark.parametrize("module", [Masked, LeastLength, OfPadding, Filled, NormedHeads, Positions])
def test_own_values_allow_chunks(module: type[nn.Module]) -> None:
    graph = ir.from_proto(lower(capture(module()))).graph
    assert classify(graph)["logits"] is Kind.POOLED


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("mechanism", sorted(LAYERS))
def test_own_models_have_expected_kinds(mechanism: str) -> None:
    longest = 64 if mechanism == "aft_full" else None
    settings = {"mechanism": mechanism, "window": 3, "max_length": longest}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings))
    lowered = rewrite_as_means(lower(capture(model, max_tokens=longest))).graph
    if mechanism == "dot_product_attention":
        with pytest.raises(NotChunkable):
            classify(lowered)
        return
    kinds = classify(lowered)
    assert kinds["logits"] is Kind.POOLED
    assert kinds["embedding"] is Kind.TOKENS
    assert kinds["lt"] is Kind.MASK
