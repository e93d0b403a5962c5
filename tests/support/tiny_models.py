"""Models small enough to export in a second, and factories for ``--factory tiny_models:NAME``."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from aftexport.nn import AftSimple, ClassifierConfig, DocumentClassifier, EfficientAttention

VOCABULARY = 300
LABELS = ("invoice", "contract", "letter")
CONFIG: dict[str, Any] = {
    "mechanism": "aft_simple",
    "vocab_size": VOCABULARY,
    "num_labels": len(LABELS),
    "dim": 16,
    "depth": 1,
    "num_heads": 2,
    "ffn_dim": 32,
}


def classifier(mechanism: str = CONFIG["mechanism"]) -> DocumentClassifier:
    """Weights larger than fresh ones, so that the scores of documents differ as if trained."""
    torch.manual_seed(0)
    model = DocumentClassifier(ClassifierConfig(**CONFIG | {"mechanism": mechanism}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    return model.eval()


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, ids 0 to 255."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


class Bag(nn.Module):
    """The smallest module that can be exported: a mean of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, len(LABELS))

    def mean(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).mean(1)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.mean(input_ids))


class Applied(nn.Module):
    """A function of embedded tokens ``[B, T, D]``, and a head of its result.

    ``rows`` is the number of random rows of the embedding, or the rows themselves.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        head: nn.Module | None = None,
        *,
        rows: int | Tensor = 50,
        width: int = 8,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(rows, width) if isinstance(rows, int) else rows
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        self.function, self.head = function, head or nn.Identity()

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.function(self.embedding(input_ids)))
        return result


class Computed(Bag):
    """The head of a function of the module and the ids."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.compute(self, input_ids))


class Through(Bag):
    """The head of the mean of a function of the embedded tokens."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        x = self.function(x)
        return self.head(x.mean(1))


class NormalizedOverBatch(Bag):
    """Documents of one run change each other's scores."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        return self.head((x / x.abs().max()).mean(1))


class ShapeBranch(Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        mean = self.mean(input_ids)
        return self.head(mean * 2 if input_ids.shape[1] > 10 else mean)


class ValueBranch(Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        mean = self.mean(input_ids)
        return self.head(mean * 2 if input_ids.sum() > 10 else mean)


class OtherArguments(Bag):
    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.mean(tokens * mask))


class NoEmbedding(Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(input_ids[..., None].float().expand(-1, -1, 16).mean(1))


class Autocast(Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(input_ids).float()


class Pair(Bag):
    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        mean = self.mean(input_ids)
        return self.head(mean), mean


class LogitsByToken(Bag):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids))


class Positions(Bag):
    """Positions up to 32 are learned, and the module does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = self.positions.weight[: input_ids.shape[1]]
        return self.head((self.embedding(input_ids) + positions).mean(1))


class FewerPositions(Positions):
    """The config declares more positions than the forward takes."""

    config = SimpleNamespace(max_position_embeddings=64, pad_token_id=0)


class PositionsOfEach(Bag):
    """The table is repeated for each document before it is cut to their length."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 8, 1, 16))

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, tokens = input_ids.shape
        table = self.rows.expand(batch, 8, 4, 16).reshape(batch, 32, 16)
        return self.head((self.embedding(input_ids) + table[:, :tokens]).mean(1))


class EmbeddedPositions(Bag):
    """Positions from 2 to 33 have a row of an embedding, and the module does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(34, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1]).unsqueeze(0).expand_as(input_ids) + 2
        return self.head((self.embedding(input_ids) + self.positions(places)).mean(1))


class ClassToken(Bag):
    """Positions up to 32 are learned, one of them for a token before the document."""

    max_length = 32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions = nn.Parameter(torch.randn(1, 1, 16)), nn.Embedding(32, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = torch.cat([self.first.expand(input_ids.shape[0], -1, -1), self.embedding(input_ids)], 1)
        return self.head((x + self.positions.weight[: x.shape[1]]).mean(1))


class DropoutAlwaysOn(Bag):
    """Forgets to tell that it is not training."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(self.mean(input_ids), 0.5))


class NotANumber(Bag):
    def __init__(self) -> None:
        super().__init__()
        nn.init.constant_(self.head.bias, torch.nan)


class Tied(Bag):
    """Two names for one weight, and a buffer of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.head
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))


class FixedType(Bag):
    """Takes weights of float32 alone, and a mask that need not be given."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if self.head.weight.dtype != torch.float32:
            raise TypeError("float32 is expected")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.head((self.embedding(input_ids) * mask[..., None]).mean(1))


class RunningMean(Bag):
    """Updates a buffer in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(16))

    def forward(self, input_ids: Tensor) -> Tensor:
        mean = self.mean(input_ids)
        self.running.mul_(0.9).add_(mean.mean(0) * 0.1)
        return self.head(mean - self.running)


class FilledHeads(Bag):
    """Fills heads in place where there is padding, as keys are; the heads are a view."""

    def __init__(self, fill: Any) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids) * 2
        heads = x.unflatten(2, (2, -1)).transpose(1, 2)
        padding = torch.arange(x.shape[1]) >= lengths[:, None]
        self.fill(heads, padding[:, None, :, None])
        return self.head((x + heads.transpose(1, 2).flatten(2)).mean(1))


class Dropout(Bag):
    """Gives another answer each time unless it is put in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.dropout(self.mean(input_ids)))


class MixedSettings(nn.Module):
    """Two settings of one operator, twice over."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(
            [
                AftSimple(16, gate="sigmoid"),
                AftSimple(16, gate="none"),
                EfficientAttention(16, 2, normalization="softmax", scale=0.5),
                EfficientAttention(16, 4, normalization="scaling", scale=2.0),
                AftSimple(16, gate="sigmoid"),
            ]
        )
        self.head = nn.Linear(16, len(LABELS))

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + layer(x, lengths)
        return self.head(x[:, 0])


def raising() -> nn.Module:
    raise RuntimeError("the factory is out of order")


def exiting() -> nn.Module:
    raise SystemExit


def number() -> int:
    return 3
