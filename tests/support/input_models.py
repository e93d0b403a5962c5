"""Small models of features or with extra inputs, for ``--factory input_models:NAME``."""

import json
from pathlib import Path

import torch
from tiny_models import CONFIG, VOCABULARY
from torch import Tensor, nn

from aftexport.nn import ClassifierConfig
from aftexport.nn.classifier import MeanPooling
from aftexport.nn.encoder import Encoder

WIDTH, REGIONS, FLAGS, TYPES = 4, 5, 3, 6
INPUTS = {
    "static": f"vector:{WIDTH}",
    "region": "category",
    "flags": "categories:2",
    "token_type_ids": "token_category",
}
"""The kinds of the inputs of ``Events``."""


def _enlarge(module: nn.Module) -> None:
    """Enlarge the weights, so that the scores of documents differ as if trained."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.5)


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean over the tokens of a mask, or over all."""
    mask = torch.ones_like(x[..., 0]) if mask is None else mask.to(x.dtype)
    return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class _Encoded(nn.Module):
    def __init__(self, mechanism: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = ClassifierConfig(**CONFIG | {"mechanism": mechanism, "window": 4, "depth": 2})
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.encoder = Encoder(config)
        self.pooling = MeanPooling()
        self.head = nn.Linear(config.dim, config.num_labels or 3)


class Events(_Encoded):
    """Tokens with types, in a document with a vector, a region and flags."""

    def __init__(self, mechanism: str = "aft_simple") -> None:
        super().__init__(mechanism)
        dim = self.head.in_features
        self.types = nn.Embedding(TYPES, dim)
        self.regions = nn.Embedding(REGIONS, dim)
        self.flags = nn.Embedding(FLAGS, dim)
        self.static = nn.Linear(WIDTH, dim)
        _enlarge(self)

    def forward(
        self,
        input_ids: Tensor,
        static: Tensor,
        region: Tensor,
        lengths: Tensor,
        flags: Tensor,
        token_type_ids: Tensor,
        labels: Tensor | None = None,
    ) -> Tensor:
        x = self.embedding(input_ids) + self.types(token_type_ids)
        x = x + torch.relu(self.static(static)).unsqueeze(1)
        encoded = self.encoder(x, lengths)
        pooled = self.pooling(encoded, lengths) + self.regions(region) + self.flags(flags).sum(1)
        return self.head(pooled)


class Late(_Encoded):
    """A vector of the document that is joined to the pooled tokens."""

    def __init__(self, mechanism: str = "aft_simple") -> None:
        super().__init__(mechanism)
        self.head = nn.Linear(self.head.in_features + WIDTH, 3)
        _enlarge(self)

    def forward(self, input_ids: Tensor, lengths: Tensor, static: Tensor) -> Tensor:
        pooled = self.pooling(self.encoder(self.embedding(input_ids), lengths), lengths)
        return self.head(torch.cat([pooled, static], 1))


class Repeated(_Encoded):
    """A vector of the document that is joined to every token, before the encoder."""

    def __init__(self, mechanism: str = "aft_simple") -> None:
        super().__init__(mechanism)
        self.join = nn.Linear(self.head.in_features + WIDTH, self.head.in_features)
        _enlarge(self)

    def forward(self, input_ids: Tensor, lengths: Tensor, static: Tensor) -> Tensor:
        rows = static[:, None].expand(-1, input_ids.shape[1], -1)
        x = self.join(torch.cat([self.embedding(input_ids), rows], 2))
        return self.head(self.pooling(self.encoder(x, lengths), lengths))


class MaskedTypes(nn.Module):
    """A transformers-like forward: a mask, and types that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.types = nn.Embedding(2, 16)
        self.head = nn.Linear(16, 3)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        x = self.embedding(input_ids)
        if token_type_ids is not None:
            x = x + self.types(token_type_ids)
        return self.head(_mean(torch.relu(x), attention_mask))


class Counted(Late):
    """A number of the document that is used as it is."""

    def forward(self, input_ids: Tensor, lengths: Tensor, count: Tensor) -> Tensor:
        rows = count[:, None].to(self.embedding.weight.dtype).expand(-1, WIDTH)
        return super().forward(input_ids, lengths, rows / 10)


class Ranked(Late):
    """A vector that is divided by the largest of the batch."""

    def forward(self, input_ids: Tensor, lengths: Tensor, static: Tensor) -> Tensor:
        return super().forward(input_ids, lengths, static / static.abs().max())


class Track(nn.Module):
    """Features of each token, with a vector of the document and a type of each token."""

    num_features = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection, self.static = nn.Linear(3, 16), nn.Linear(WIDTH, 16)
        self.types, self.head = nn.Embedding(TYPES, 16), nn.Linear(16, 3)

    def forward(
        self, input_features: Tensor, lengths: Tensor, static: Tensor, types: Tensor
    ) -> Tensor:
        x = self.projection(input_features) + self.types(types) + self.static(static)[:, None]
        positions = torch.arange(input_features.shape[1])
        mask = (positions < lengths[:, None])[..., None]
        return self.head((torch.relu(x) * mask).sum(1) / lengths[:, None])


class Logarithm(nn.Module):
    """Takes the logarithm of a number of the document, NaN below -1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, age: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).mean(1) + age.log1p()[:, None])


FEATURES = 4
NAMES = ("north", "east", "speed", "depth")
MEAN = (1.5, -2.0, 0.0, 10.0)
SCALE = (0.5, 4.0, 1.0, 3.0)


class Sensors(nn.Module):
    """A projection of features, an encoder, and the mean of the tokens."""

    num_features = FEATURES

    def __init__(self, mechanism: str = "aft_simple") -> None:
        super().__init__()
        torch.manual_seed(0)
        config = ClassifierConfig(**CONFIG | {"mechanism": mechanism, "window": 4})
        self.projection = nn.Linear(FEATURES, config.dim)
        self.encoder = Encoder(config)
        self.pooling = MeanPooling()
        self.head = nn.Linear(config.dim, config.num_labels or 3)
        _enlarge(self)

    def forward(self, input_features: Tensor, lengths: Tensor) -> Tensor:
        encoded = self.encoder(self.projection(input_features), lengths)
        return self.head(self.pooling(encoded, lengths))


class Undeclared(nn.Module):
    """The mean of projected features, without lengths and without a declared number of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.projection(x)).mean(1))


class Masked(nn.Module):
    """A mean of tokens by ``attention_mask``; without a mask it counts the padding too."""

    num_features = FEATURES

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Linear(FEATURES, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.head(_mean(torch.relu(self.projection(inputs_embeds)), attention_mask))


def feature_file(folder: Path) -> Path:
    """Write the file of ``--feature-file``."""
    path = folder / "features.json"
    path.write_text(json.dumps({"names": NAMES, "mean": MEAN, "scale": SCALE}), "utf-8")
    return path
