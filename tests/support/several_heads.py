"""Models whose forward returns several tensors by name, small enough to export in seconds."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from tiny_models import CONFIG, VOCABULARY
from torch import Tensor, nn

from aftexport.nn import (
    AftSimple,
    ClassifierConfig,
    DocumentClassifier,
    HeadConfig,
    MultiHeadClassifier,
    MultiHeadConfig,
)

TASKS = {
    "topic": "single_label_classification",
    "flags": "multi_label_classification",
    "age": "regression",
}
"""The task of each output of ``Documents``."""
WIDTHS = {"topic": 3, "flags": 2, "age": 1}


class Encoder(nn.Module):
    """An embedding, one attention, and a mean over the tokens of a document."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = AftSimple(16)

    def encode(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the value of each token, ``[batch, tokens, 16]``."""
        x = self.embedding(input_ids)
        return x + self.attention(self.norm(x), lengths)

    def pool(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Return the mean over each document's own tokens."""
        valid = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        return (tokens * valid[..., None]).sum(1) / lengths[:, None]


def output_layers(widths: Mapping[str, int]) -> nn.ModuleDict:
    """Return a linear layer for each output, with weights that separate its values."""
    layers = nn.ModuleDict({name: nn.Linear(16, width) for name, width in widths.items()})
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.mul_(9)
    return layers


class Documents(Encoder):
    """A label, some labels and a number for each document, and a loss that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(16, width) for name, width in WIDTHS.items()})

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor | None]:
        pooled = self.pool(self.encode(input_ids, lengths), lengths)
        return {"loss": None, **{name: head(pooled) for name, head in self.heads.items()}}


def classifier() -> MultiHeadClassifier:
    """Return a model of aftexport's own layers, with the outputs of ``Documents``."""
    torch.manual_seed(6)
    heads = {n: HeadConfig(problem_type=t, num_labels=WIDTHS[n]) for n, t in TASKS.items()}
    settings = {name: value for name, value in CONFIG.items() if name != "num_labels"}
    return MultiHeadClassifier(MultiHeadConfig(**settings, heads=heads)).eval()


class Pair(NamedTuple):
    """Two outputs of which the names collide with those of operators."""

    embedding: Tensor
    linear: Tensor


class Named(Documents):
    """Returns a NamedTuple."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Pair:  # type: ignore[override]
        pooled = self.pool(self.encode(input_ids, lengths), lengths)
        return Pair(self.heads["topic"](pooled), self.heads["flags"](pooled))


TOKEN_TASKS = {
    "tags": "token_classification",
    "topic": "single_label_classification",
    "hidden": "feature_extraction",
}
"""The task of each output of ``Tokens``."""


class Tokens(nn.Module):
    """A label and a vector for each token, and a label for the document, of one encoder."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        config = ClassifierConfig(**CONFIG | {"vocab_size": VOCABULARY})
        # The classifier itself would declare its own task.
        parts = DocumentClassifier(config)
        self.embedding, self.encoder, self.pooling = parts.embedding, parts.encoder, parts.pooling
        self.topic = nn.Linear(16, 3)
        self.tags = nn.Linear(16, 5)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(self.embedding(input_ids), lengths)
        topic = self.topic(self.pooling(hidden, lengths))
        return {"tags": self.tags(hidden), "topic": topic, "hidden": hidden}


class OnlyTags(Tokens):
    """A label for each token, as the only output."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, lengths)["tags"]


class SingleNumbers(Tokens):
    """One number for each token, and one for the document, without an axis for it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(16, 1)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(self.embedding(input_ids), lengths)
        # Without an axis, squeeze also drops those of one document and of one token.
        whole = self.one(self.pooling(hidden, lengths)).squeeze()
        return {"each": self.one(hidden).squeeze(-1), "whole": whole}


class OneMore(Tokens):
    """Rows for the tokens, and one for the document before them."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.encoder(self.embedding(input_ids), lengths)
        return self.tags(torch.cat([hidden.mean(1, keepdim=True), hidden], 1))


class Smeared(Tokens):
    """The rows of a document depend on the padding of its batch."""

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(input_ids)
        return self.tags(x - x.mean(1, keepdim=True))


class Kinds(Encoder):
    """One of two labels of a document, in an output with a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = output_layers({"kind": 2})

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        pooled = self.pool(self.encode(input_ids, lengths), lengths)
        return {name: head(pooled) for name, head in self.heads.items()}
