"""The document classifier."""

from torch import Tensor, nn

from aftexport.nn.config import ClassifierConfig
from aftexport.nn.encoder import Encoder
from aftexport.nn.pooling import AttentionPooling, MeanPooling


def build_pooling(config: ClassifierConfig) -> nn.Module | None:
    """Build the pooling of a model's tokens; None for outputs of each token."""
    if config.is_per_token:
        return None
    return MeanPooling() if config.pooling == "mean" else AttentionPooling(config.dim)


def build_head(config: ClassifierConfig) -> nn.Module:
    """Build the layer of a model's outputs; vectors are returned as they are."""
    if config.num_labels is None:
        return nn.Identity()
    return nn.Linear(config.dim, config.num_labels)


class DocumentClassifier(nn.Module):
    """A classifier of token ids: embedding, pre-norm encoder, masked pooling, linear head.

    A model of ``config.is_per_token`` has no pooling, and one of feature_extraction no head.
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = Encoder(config)
        self.pooling = build_pooling(config)
        self.head = build_head(config)

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens of a document; None if there is no bound."""
        learned = self.config.mechanism in ("aft_full", "aft_local")
        return self.config.max_length if learned else None

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits, values or vectors of documents.

        Args:
            input_ids: int64 ``[B, T]``, padded on the right with any valid id.
            lengths: int64 ``[B]``, the number of tokens of each document.

        Returns:
            ``[B, num_labels]``, or ``[B, T, num_labels]`` for token_classification, whose rows of
            padding mean nothing. For feature_extraction, the last axis has ``dim`` numbers.

        Raises:
            ValueError: if T is more than the mechanism's ``max_length``.
        """
        encoded = self.encoder(self.embedding(input_ids), lengths)
        if self.pooling is not None:
            encoded = self.pooling(encoded, lengths)
        return self.head(encoded)
