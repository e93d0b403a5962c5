"""The configuration of a document classifier."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from aftexport.errors import UsageError
from aftexport.heads import HEADS, FeatureExtraction, TokenClassification
from aftexport.operators.mechanisms import MECHANISMS

LAYERS = (*MECHANISMS, "dot_product_attention")
_CHOICES = {
    "mechanism": LAYERS,
    "pooling": ("mean", "attention", "none"),
    "gate": ("sigmoid", "tanh", "none"),
    "normalization": ("softmax", "scaling"),
    "feature_map": ("elu", "relu"),
    "problem_type": tuple(HEADS),
}
_COUNTS = (
    "vocab_size",
    "num_labels",
    "dim",
    "depth",
    "num_heads",
    "ffn_dim",
    "max_length",
    "window",
    "bias_rank",
)
_MAX_COUNT = 1 << 26
"""Limit of every count: the byte count of a matrix of two such counts fits into 64 bits."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Configuration of ``DocumentClassifier``.

    Attributes:
        mechanism: the token-mixing layer; one of ``LAYERS``.
        vocab_size: number of token ids.
        num_labels: number of outputs: of classes, of values, or 1 for a binary classification;
            None for feature_extraction, whose vectors have ``dim`` numbers.
        dim: channels D.
        depth: number of encoder layers.
        num_heads: number of heads, for mechanisms with heads.
        ffn_dim: hidden channels of the feed-forward network.
        max_length: maximum number of tokens, for learned positions (aft_full; aft_local
            with a bias for each pair). None: any number.
        window: window s of aft_local, number of taps of aft_conv.
        bias_rank: number of columns of the position-bias factors.
        causal: whether a token sees only itself and earlier tokens.
        pooling: the reduction of the tokens to one vector, mean or attention; none for the vector
            of each token, in feature_extraction. A token_classification pools nothing.
        gate: the gate of the AFT mechanisms: sigmoid, tanh or none.
        normalization: the normalization of efficient_attention: softmax or scaling.
        feature_map: the feature map of linear_attention: elu or relu.
        problem_type: the task of the head, by the names of transformers; one of
            ``aftexport.heads.HEADS``.

    Raises:
        UsageError: if a value is not one of the choices, a count is not a whole number from 1
            to 67,108,864, or two values do not fit together.
    """

    mechanism: str
    vocab_size: int
    num_labels: int | None = None
    dim: int = 64
    depth: int = 2
    num_heads: int = 4
    ffn_dim: int = 256
    max_length: int | None = None
    window: int = 32
    bias_rank: int = 64
    causal: bool = False
    pooling: str = "mean"
    gate: str = "sigmoid"
    normalization: str = "softmax"
    feature_map: str = "elu"
    problem_type: str = "single_label_classification"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                known = ", ".join(choices)
                raise UsageError(
                    f"{name} must be one of {known}, got {value!r}.", f"Choose one of {known}."
                )
        for name in _COUNTS:
            value = getattr(self, name)
            is_optional = name == "max_length" or (name == "num_labels" and self._is_features)
            if not _is_count(value) and not (is_optional and value is None):
                expected = "a positive whole number" + (" or null" if is_optional else "")
                raise UsageError(f"{name} must be {expected}, got {value!r}.", f"Give {expected}.")
            if value is not None and value > _MAX_COUNT:
                raise UsageError(
                    f"{name} must be at most {_MAX_COUNT}, got {value}.",
                    f"Give at most {_MAX_COUNT}.",
                )
        if not isinstance(self.causal, bool):
            raise UsageError(
                f"causal must be true or false, got {self.causal!r}.", "Give true or false."
            )
        if self.dim % self.num_heads:
            raise UsageError(
                f"num_heads must divide dim {self.dim}, got {self.num_heads}.",
                "Choose a number of heads that divides dim.",
            )
        if self.mechanism == "aft_full" and self.max_length is None:
            raise UsageError(
                "aft_full needs max_length for its bias of every pair of positions, got null.",
                "Set max_length to the longest document, in tokens.",
            )
        if self._is_features and self.num_labels is not None:
            raise UsageError(
                f"num_labels must be null for feature_extraction, got {self.num_labels}.",
                "Set dim to the number of numbers in a vector.",
            )
        if self.pooling == "none" and not self.is_per_token:
            raise UsageError(
                f"pooling must be mean or attention for {self.problem_type}, got 'none'.",
                "Choose mean or attention.",
            )

    @property
    def _is_features(self) -> bool:
        return HEADS[self.problem_type] is FeatureExtraction

    @property
    def outputs(self) -> int:
        """The number of outputs of a document, or of each of its tokens."""
        return self.dim if self.num_labels is None else self.num_labels

    @property
    def is_per_token(self) -> bool:
        """Whether the model has a row of outputs for each token of a document."""
        if self._is_features:
            return self.pooling == "none"
        return HEADS[self.problem_type] is TokenClassification

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a configuration; raise UsageError if a name is unknown or missing."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(str(name) for name in set(values) - known):
            raise UsageError(
                f"Expected known configuration entries, got {', '.join(unknown)}.",
                f"Choose from {', '.join(sorted(known))}.",
            )
        required = {"mechanism", "vocab_size"}
        if values.get("problem_type") != "feature_extraction":
            required.add("num_labels")
        if missing := sorted(required - set(values)):
            raise UsageError(f"The configuration lacks {', '.join(missing)}.", "Add the entries.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON-ready values."""
        return asdict(self)
