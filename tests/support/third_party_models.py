"""Classifiers around attention of other projects, for ``--factory third_party_models:NAME``."""

import torch
from torch import Tensor, nn

DIM, POSITIONS = 16, 36


class AftSimple(nn.Module):
    """AFT-simple in standard operators."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.key(x), 1)
        return torch.sigmoid(self.query(x)) * (weights * self.value(x)).sum(1, keepdim=True)


class AftFull(AftSimple):
    """AFT-full, with a table of positions that bounds the length."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(POSITIONS, POSITIONS))

    def forward(self, x: Tensor) -> Tensor:
        weights, keys = self.bias[: x.shape[1], : x.shape[1]].exp(), self.key(x).exp()
        mean = (weights @ (keys * self.value(x))) / (weights @ keys)
        return torch.sigmoid(self.query(x)) * mean


class Classifier(nn.Module):
    """Embedding, attention, a mean, a head; its input has a name of its own."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(50, DIM), attention
        self.head = nn.Linear(DIM, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        logits: Tensor = self.head((x + self.attention(x)).mean(1))
        return logits


def simple() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(AftSimple())


def full() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(AftFull())


class Pooled(Classifier):
    """With a mean weighted by a softmax, of whole documents only."""

    def __init__(self) -> None:
        super().__init__(AftSimple())
        self.scores = nn.Linear(DIM, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        logits: Tensor = self.head((torch.softmax(self.scores(x), 1) * x).sum(1))
        return logits


def pooled() -> nn.Module:
    torch.manual_seed(0)
    return Pooled()


def nothing() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(nn.Linear(DIM, DIM))


def embeddings() -> nn.Module:
    return AftSimple()
