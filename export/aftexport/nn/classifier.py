"""The document classifier."""

from torch import Tensor, nn

from aftexport.nn.config import ClassifierConfig
from aftexport.nn.encoder import Encoder
from aftexport.nn.pooling import AttentionPooling, MeanPooling


class DocumentClassifier(nn.Module):
    """A classifier of token ids: embedding, pre-norm encoder, masked pooling, linear head."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = Encoder(config)
        self.pooling = MeanPooling() if config.pooling == "mean" else AttentionPooling(config.dim)
        self.head = nn.Linear(config.dim, config.num_labels)

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens of a document; None if there is no bound."""
        learned = self.config.mechanism in ("aft_full", "aft_local")
        return self.config.max_length if learned else None

    def forward(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the class logits of documents.

        Args:
            input_ids: int64 ``[B, T]``, padded on the right with any valid id.
            lengths: int64 ``[B]``, the number of tokens of each document.

        Returns:
            Logits ``[B, num_labels]``.

        Raises:
            ValueError: if T is more than the mechanism's ``max_length``.
        """
        encoded = self.encoder(self.embedding(input_ids), lengths)
        return self.head(self.pooling(encoded, lengths))
