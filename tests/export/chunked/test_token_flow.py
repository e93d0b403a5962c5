"""A computation that a chunk cannot do is refused, and the error names it."""

from collections.abc import Callable
from typing import Any

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


class Model(nn.Module):
    """A document classifier whose embedded tokens, or whose sum, a test chooses."""

    def __init__(self, **chosen: Callable[..., Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tiny_models.VOCABULARY, 8)
        self.positions = nn.Embedding(4096, 8)
        self.attention = AftSimple(8)
        self.score, self.head = nn.Linear(8, 1), nn.Linear(8, 3)
        self.chosen = {"tokens": embedded, "total": attended_sum} | chosen

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.chosen["tokens"](self, input_ids)
        return self.head(self.chosen["total"](self, x, lengths))

    def rows(self, ids: Tensor) -> Tensor:
        """Return the numbers of each position, ``[T, 8]``."""
        return self.positions.weight[: ids.shape[1]]


def embedded(model: Any, ids: Tensor) -> Tensor:
    return model.embedding(ids)


def attended_sum(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    return model.attention(x, lengths).sum(1)


def heads(model: Any, ids: Tensor) -> Tensor:
    return model.embedding(ids).reshape(*ids.shape, 2, 4)


def repeated_sum(model: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Add the sum of the document to each head, once more for each token."""
    x = model.attention(x, lengths)
    pooled = x.sum(1).reshape(-1, 1, 2, 4).expand(-1, x.shape[1], -1, -1)
    return (x.reshape(*x.shape[:2], 2, 4) + pooled.cumsum(1)).flatten(2).sum(1)


def chosen(x: Tensor, places: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0]), places]


def last_places(x: Tensor, lengths: Tensor) -> Tensor:
    places = torch.arange(x.shape[1])
    return (places * (places < lengths[:, None])).argmax(-1)


TOKENS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "by length": lambda m, ids: m.embedding(ids) / ids.shape[1],
    "sums so far": lambda m, ids: m.embedding(ids).cumsum(1),
    "centered": lambda m, ids: m.embedding(ids) - m.embedding(ids).sum(1, keepdim=True),
    "heads over tokens": lambda m, ids: (
        heads(m, ids) + heads(m, ids).sum(1, keepdim=True)
    ).flatten(2),
    "heads by position": lambda m, ids: (heads(m, ids) * m.rows(ids)[:, :2, None]).flatten(2),
    "normed heads": lambda m, ids: (
        heads(m, ids) / heads(m, ids).square().sum(-1, keepdim=True).sqrt()
    ).flatten(2),
    "positions": lambda m, ids: m.embedding(ids) + m.positions(torch.arange(ids.shape[1])),
}
"""Embeddings of the tokens."""
TOTALS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "flat softmax": lambda m, x, _: (x * m.score(x).squeeze(-1).softmax(-1)[..., None]).sum(1),
    "repeated sum": repeated_sum,
    "chosen by values": lambda m, x, n: chosen(
        m.attention(x, n), m.score(x).squeeze(-1).argmax(-1)
    ),
    "last chosen": lambda m, x, n: chosen(m.attention(x, n), last_places(x, n)),
    "one before the last": lambda m, x, n: chosen(m.attention(x, n), last_places(x, n) - 1),
}
"""Vectors of the document."""


class Masked(Model):
    """Weighs each token by a mask, and attends to a number of tokens, of which a test changes one.

    By default the mask is that of the document's own tokens, and they all are attended to.
    """

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        chosen = self.chosen
        places = torch.arange(input_ids.shape[1])
        counted = chosen.get("counted", lambda n: n)(lengths)[:, None]
        mask = chosen.get("mask", lambda places, counted: places < counted)(places, counted)
        weights = mask.float()
        if "weights" in chosen:
            weights = chosen["weights"](self, input_ids, lengths, mask)
        attended = chosen.get("attended", lambda n: n)(lengths)
        x = self.attention(self.embedding(input_ids) * weights[..., None], attended)
        total = weights.sum(1)[..., None].clamp(min=1)
        return self.head((x * weights[..., None]).sum(1) / total)


MASKED: dict[str, dict[str, Callable[..., Tensor]]] = {
    "masked": {},
    "first thousands": {"counted": lambda n: n.clamp(max=5000)},
    "first half": {"counted": lambda n: n // 2},
    "all but the first": {"mask": lambda places, n: torch.arange(1, places.shape[0] + 1) < n},
    "all but the last": {"mask": lambda places, n: places + 1 < n},
    "last": {"mask": lambda places, n: places >= n - 1},
    "of padding": {"mask": lambda places, n: ~(places >= n.clamp(1, places.shape[0]))},
    "positions in weights": {"weights": lambda m, ids, n, mask: mask.float() * m.rows(ids)[:, 0]},
    "share": {"weights": lambda m, ids, n, mask: mask.float() / n[:, None]},
    "filled": {"weights": lambda m, ids, n, mask: torch.zeros(ids.shape).masked_fill(mask, 1)},
    "attends to thousands": {"attended": lambda n: n.clamp(max=5000)},
    "least length": {"attended": lambda n: n.clamp(min=1)},
}
"""The changes to ``Masked``."""


def model_of(name: str) -> Model:
    if name in MASKED:
        return Masked(**MASKED[name])
    return Model(tokens=TOKENS[name]) if name in TOKENS else Model(total=TOTALS[name])


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("by length", "scales tokens by the document's length"),
        ("sums so far", "CumSum .* is not known to act on each token alone"),
        ("heads over tokens", "ReduceSum .* is not known to act on each token alone"),
        ("flat softmax", "Softmax .* is not known to act on each token alone"),
        ("heads by position", "uses the positions of tokens"),
        ("centered", "attends to tokens that depend on the pooled document"),
        ("chosen by values", "ArgMax .* is not known to act on each token alone"),
        ("one before the last", "uses the place of a token"),
        ("repeated sum", "brings the pooled document back to its tokens"),
        ("positions in weights", "uses the positions of tokens"),
        ("share", "scales tokens by the document's length"),
        ("first thousands", "uses the positions of tokens"),
        ("first half", "uses the positions of tokens"),
        ("all but the first", "scales tokens by the document's length"),
        ("all but the last", "uses the positions of tokens"),
        ("last", "uses the positions of tokens"),
        ("attends to thousands", "attends to other tokens than the document has"),
    ],
)
def test_obstacle_to_chunks_is_named(name: str, reason: str) -> None:
    with pytest.raises(NotChunkable, match=reason):
        classify(ir.from_proto(lower(capture(model_of(name), max_tokens=4096))).graph)


@pytest.mark.table(keep=0.34, by=any_case)
@pytest.mark.parametrize(
    "name",
    ["masked", "least length", "of padding", "filled", "normed heads", "positions", "last chosen"],
)
def test_own_values_allow_chunks(name: str) -> None:
    graph = ir.from_proto(lower(capture(model_of(name)))).graph
    assert classify(graph)["logits"] is Kind.POOLED


@pytest.mark.table(keep=0.3, by=any_case)
@pytest.mark.parametrize("mechanism", sorted(LAYERS))
def test_own_models_have_expected_kinds(mechanism: str) -> None:
    longest = 64 if mechanism == "aft_full" else None
    settings = {"mechanism": mechanism, "window": 3, "max_length": longest}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | settings))
    lowered = rewrite_as_means(lower(capture(model, max_tokens=longest))).graph
    kinds = classify(lowered)
    assert kinds["logits"] is Kind.POOLED
    assert kinds["embedding"] is Kind.TOKENS
    assert Kind.MASK in kinds.values()
