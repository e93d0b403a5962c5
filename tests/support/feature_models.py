"""Small models of features, and factories for ``--factory feature_models:NAME``."""

import json
from pathlib import Path

import torch
from tiny_models import CONFIG
from torch import Tensor, nn

from aftexport.nn import ClassifierConfig
from aftexport.nn.classifier import MeanPooling
from aftexport.nn.encoder import Encoder

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
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(1.5)

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
        x = torch.relu(self.projection(inputs_embeds))
        mask = torch.ones_like(x[..., 0]) if attention_mask is None else attention_mask.to(x.dtype)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def feature_file(folder: Path) -> Path:
    """Write the file of ``--feature-file``."""
    path = folder / "features.json"
    path.write_text(json.dumps({"names": NAMES, "mean": MEAN, "scale": SCALE}), "utf-8")
    return path
