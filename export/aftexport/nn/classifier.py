"""The models of documents: a classifier with one output, and one with several."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from aftexport.nn.config import ClassifierConfig, EncoderConfig, HeadConfig, MultiHeadConfig
from aftexport.nn.encoder import Encoder
from aftexport.operators.numerics import softmax_mean, valid_keys


def build_pooling(config: HeadConfig, dim: int) -> nn.Module | None:
    """Build the pooling of an output; None for an output of each token."""
    if config.is_per_token:
        return None
    match config.pooling:
        case "attention":
            return AttentionPooling(dim)
        case "max":
            return MaxPooling()
        case "logsumexp":
            return LogSumExpPooling(config.pooling_temperature)
        case "top_k":
            assert config.pooling_k is not None  # the configuration checks this
            return TopKPooling(config.pooling_k)
        case _:
            return MeanPooling()


def build_head(config: HeadConfig, dim: int) -> nn.Module:
    """Build the last layer of an output; vectors are returned as they are."""
    return nn.Identity() if config.num_labels is None else nn.Linear(dim, config.num_labels)


class _DocumentModel(nn.Module):
    """The embedding of ids, or the projection of features, and the encoder of a model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embedding: nn.Embedding | nn.Linear
        if config.num_features is not None:
            self.embedding = nn.Linear(config.num_features, config.dim)
        else:
            assert config.vocab_size is not None  # the configuration checks this
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.encoder = Encoder(config)
        learned = config.mechanism in ("aft_full", "aft_local")
        self._max_length = config.max_length if learned else None

    @property
    def max_length(self) -> int | None:
        """The maximum number of tokens of a document; None if there is no bound."""
        return self._max_length

    def _encode(
        self, input_ids: Tensor | None, lengths: Tensor | None, input_features: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the encoded tokens, and the lengths."""
        tokens = input_features if input_ids is None else input_ids
        if tokens is None or lengths is None:
            raise ValueError("expected lengths, and input_ids or input_features")
        return self.encoder(self.embedding(tokens), lengths), lengths


class DocumentClassifier(_DocumentModel):
    """A classifier of documents: embedding, pre-norm encoder, masked pooling, linear head.

    With ``num_features`` in its configuration, a linear projection replaces the embedding.

    An output of each token has no pooling, and feature_extraction has no linear head.
    """

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.config = config
        self.pooling = build_pooling(config.head_config, config.dim)
        self.head = build_head(config.head_config, config.dim)

    def forward(
        self,
        input_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        *,
        input_features: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, values or vectors of documents.

        Args:
            input_ids: int64 ``[B, T]``, padded on the right with any valid id; None for a model
                of features.
            lengths: int64 ``[B]``, the number of tokens of each document; always needed.
            input_features: floats ``[B, T, num_features]``, padded on the right, for a model of
                features.

        Returns:
            ``[B, num_labels]``, or ``[B, T, num_labels]`` for an output of each token, whose rows
            of padding mean nothing. For feature_extraction, the last axis has ``dim`` numbers.

        Raises:
            ValueError: if T is more than the mechanism's ``max_length``, or an input is missing.
        """
        encoded, lengths = self._encode(input_ids, lengths, input_features)
        return self.head(encoded if self.pooling is None else self.pooling(encoded, lengths))


class MultiHeadClassifier(_DocumentModel):
    """A model with several outputs, which share the embedding and the encoder."""

    def __init__(self, config: MultiHeadConfig) -> None:
        super().__init__(config)
        self.config = config
        # A ModuleDict refuses names such as "type".
        heads = config.heads.values()
        self.poolings = nn.ModuleList(
            build_pooling(head, config.dim) or nn.Identity() for head in heads
        )
        self.heads = nn.ModuleList(build_head(head, config.dim) for head in heads)

    def forward(
        self,
        input_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        *,
        input_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return each output by its name; see ``DocumentClassifier``."""
        encoded, lengths = self._encode(input_ids, lengths, input_features)
        outputs = {}
        for (name, config), pooling, head in zip(
            self.config.heads.items(), self.poolings, self.heads, strict=True
        ):
            outputs[name] = head(encoded if config.is_per_token else pooling(encoded, lengths))
        return outputs


def build_classifier(config: EncoderConfig) -> DocumentClassifier | MultiHeadClassifier:
    """Build the model of a configuration."""
    if isinstance(config, MultiHeadConfig):
        return MultiHeadClassifier(config)
    assert isinstance(config, ClassifierConfig)
    return DocumentClassifier(config)


PADDED_SCORE = -1e38
"""Score of padding. It is finite so that a softmax of only padding gives numbers in ONNX too."""


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in at least 32 bits."""
    return x.float() if x.dtype.itemsize < 4 else x


def _masked(x: Tensor, lengths: Tensor) -> Tensor:
    """Return ``x [B, T, *]`` with ``PADDED_SCORE`` for padding."""
    return torch.where(valid_keys(lengths, x.shape[1])[..., None], x, PADDED_SCORE)


class MeanPooling(nn.Module):
    """Pooling by the mean of a document's own tokens."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``; a document of no tokens gives 0."""
        valid = valid_keys(lengths, x.shape[1])[..., None]
        total = _wide(x).masked_fill(~valid, 0).sum(1)
        return (total / lengths.clamp(1, x.shape[1])[:, None].to(total.dtype)).to(x.dtype)


class AttentionPooling(nn.Module):
    """Pooling by a mean weighted by a softmax of learned token scores."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``."""
        logits = _masked(_wide(self.score(x)), lengths)
        if torch.compiler.is_exporting():
            # Chunking and evidence recognize this form; passes.fuse_pooling makes its sum exact.
            pooled = (logits.softmax(1) * _wide(x)).sum(1)
        else:
            pooled = softmax_mean(logits, _wide(x)).squeeze(1)
        return pooled.to(x.dtype)


class MaxPooling(nn.Module):
    """Pooling by the maximum of each channel over a document's own tokens."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``; a document of no tokens gives 0."""
        return (_masked(_wide(x), lengths).amax(1) * (lengths > 0)[:, None]).to(x.dtype)


class LogSumExpPooling(nn.Module):
    """Pooling by a smooth maximum of each channel, ``t log(mean of exp(x / t))``.

    The temperature t leads from the maximum, at 0, to the mean, at infinity.

    Args:
        temperature: the temperature; None for a learned one, which starts at 1.

    Source: Pinheiro and Collobert, "From Image-level to Pixel-level Labeling with Convolutional
    Networks", CVPR 2015, with r = 1/t.
    """

    def __init__(self, temperature: float | None = None) -> None:
        super().__init__()
        self.temperature = temperature
        if temperature is None:
            self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``; a document of no tokens gives 0."""
        given = self.temperature
        t = _wide(self.log_temperature).exp() if given is None else given
        total = _masked(_wide(x) / t, lengths).logsumexp(1)
        counts = lengths.clamp(1, x.shape[1])[:, None].to(total.dtype)
        # The total of padding is finite, so that its product with 0 is 0.
        return ((total - counts.log()) * (lengths > 0)[:, None] * t).to(x.dtype)


class TopKPooling(nn.Module):
    """Pooling by the mean of the k largest values of each channel, or of all if there are fewer."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Pool ``x [B, T, D]`` to ``[B, D]``; a document of no tokens gives 0."""
        padded = pad(_masked(_wide(x), lengths), (0, 0, 0, self.k), value=PADDED_SCORE)
        largest = padded.topk(self.k, 1).values
        counts = lengths.clamp(0, x.shape[1])
        total = torch.where(valid_keys(counts, self.k)[..., None], largest, 0).sum(1)
        return (total / counts.clamp(1, self.k)[:, None].to(total.dtype)).to(x.dtype)
