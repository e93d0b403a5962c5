"""What a chunk may not compute is refused by name."""

import pytest
import torch
import toy
from torch import Tensor, nn

from aftexport.capture import capture
from aftexport.chunked.means import as_means
from aftexport.chunked.summary import WholeOnlyError
from aftexport.chunked.tokenwise import Kind, classify
from aftexport.nn import AftSimple, ClassifierConfig, DocumentClassifier
from aftexport.nn.config import LAYERS
from aftexport.trace import lower


class Positions(nn.Module):
    """Learns an embedding of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(toy.VOCABULARY, 8)
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


class Centred(Positions):
    """Subtracts the mean of the document."""

    def embed(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return x - x.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Positions, "uses the positions of tokens"),
        (ByLength, "scales tokens by the document's length"),
        (Mixing, "CumSum .* is not known to act on each token alone"),
        (Centred, "brings the pooled document back to its tokens"),
    ],
)
def test_what_stands_against_it_is_named(module: type[nn.Module], reason: str) -> None:
    with pytest.raises(WholeOnlyError, match=reason):
        classify(lower(capture(module(), max_tokens=4096)))


@pytest.mark.parametrize("mechanism", sorted(LAYERS))
def test_models_of_ours_are_what_they_are(mechanism: str) -> None:
    longest = 64 if mechanism == "aft_full" else None
    settings = {"mechanism": mechanism, "window": 3, "max_length": longest}
    model = DocumentClassifier(ClassifierConfig(**toy.CONFIG | settings))
    lowered = as_means(lower(capture(model, max_tokens=longest)))
    if mechanism == "dot_product_attention":
        with pytest.raises(WholeOnlyError):
            classify(lowered)
        return
    kinds = classify(lowered)
    assert kinds["logits"] is Kind.POOLED
    assert kinds["embedding"] is Kind.TOKENS
    assert kinds["lt"] is Kind.MASK
