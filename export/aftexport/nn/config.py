"""The configurations of encoders, and of models with one output and with several."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from aftexport.errors import UsageError
from aftexport.heads import HEADS, Head, TokenHead
from aftexport.operators.mechanisms import MECHANISMS
from aftexport.system.contract import AXES, EVIDENCE

RECURRENT_LAYERS = (
    "gated_linear_attention",
    "retention",
    "lightning_attention",
    "delta_net",
    "gated_delta_net",
    "mamba2",
)
"""The layers of the operator ``RecurrentLinearAttention``."""
MECHANISM_LAYERS = (*MECHANISMS, *RECURRENT_LAYERS)
"""The layers of our operators."""
LAYERS = (*MECHANISM_LAYERS, "dot_product_attention")
_CHOICES = {
    "mechanism": LAYERS,
    "gate": ("sigmoid", "tanh", "none"),
    "normalization": ("softmax", "scaling"),
    "feature_map": ("elu", "relu"),
}
_COUNTS = ("dim", "depth", "num_heads", "ffn_dim", "window", "bias_rank", "conv_taps", "state_size")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Configuration of an embedding, or a projection of features, and an encoder.

    Attributes:
        mechanism: the token-mixing layer; one of ``LAYERS``.
        vocab_size: number of token ids; None for tokens of features.
        num_features: number of features of each token; None for token ids.
        dim: channels D.
        depth: number of encoder layers.
        num_heads: number of heads, for mechanisms with heads.
        ffn_dim: hidden channels of the feed-forward network.
        max_length: maximum number of tokens, for learned positions (aft_full; aft_local
            with a bias for each pair). None: any number.
        window: window s of aft_local, number of taps of aft_conv.
        bias_rank: number of columns of the position-bias factors.
        causal: whether a token sees only itself and earlier tokens.
        gate: the gate of the AFT mechanisms: sigmoid, tanh or none.
        normalization: the normalization of efficient_attention: softmax or scaling.
        feature_map: the feature map of linear_attention: elu or relu.
        conv_taps: taps of the short convolution of delta_net, gated_delta_net and mamba2.
        state_size: the width of mamba2's states.

    Raises:
        UsageError: if a value is not one of the choices, a count is not a whole number from 1
            to 67,108,864, or two values do not fit together.
    """

    mechanism: str
    vocab_size: int | None = None
    num_features: int | None = None
    dim: int = 64
    depth: int = 2
    num_heads: int = 4
    ffn_dim: int = 256
    max_length: int | None = None
    window: int = 32
    bias_rank: int = 64
    causal: bool = False
    gate: str = "sigmoid"
    normalization: str = "softmax"
    feature_map: str = "elu"
    conv_taps: int = 4
    state_size: int = 64

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        if (self.vocab_size is None) == (self.num_features is None):
            raise UsageError(
                "Expected exactly one of vocab_size and num_features, got "
                f"{self.vocab_size} and {self.num_features}.",
                "Give vocab_size for token ids, or num_features for features.",
            )
        check_count("vocab_size", self.vocab_size, is_optional=self.num_features is not None)
        check_count("num_features", self.num_features, is_optional=self.vocab_size is not None)
        check_count("max_length", self.max_length, is_optional=True)
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

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON-ready values, with the kind of its tokens only."""
        other = "vocab_size" if self.vocab_size is None else "num_features"
        return {name: value for name, value in asdict(self).items() if name != other}


def required_tokens(values: Mapping[str, Any]) -> list[str]:
    """Return the entry that the kind of a configuration's tokens needs."""
    return [] if values.get("num_features") is not None else ["vocab_size"]


_MAX_COUNT = 1 << 26
"""Limit of every count: the byte count of a matrix of two such counts fits into 64 bits."""


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise UsageError if a value is not one of the choices."""
    if value not in choices:
        known = ", ".join(choices)
        raise UsageError(
            f"{name} must be one of {known}, got {value!r}.", f"Choose one of {known}."
        )


def check_count(name: str, value: object, *, is_optional: bool = False) -> None:
    """Raise UsageError if a value is not a whole number from 1 to 67,108,864."""
    if is_optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        expected = "a positive whole number" + (" or null" if is_optional else "")
        raise UsageError(f"{name} must be {expected}, got {value!r}.", f"Give {expected}.")
    if value > _MAX_COUNT:
        raise UsageError(
            f"{name} must be at most {_MAX_COUNT}, got {value}.", f"Give at most {_MAX_COUNT}."
        )


def check_entries(kind: type[Any], values: Mapping[str, Any], required: Sequence[str]) -> None:
    """Raise UsageError if entries are missing, or are not fields of a dataclass."""
    known = {f.name for f in fields(kind)}
    if unknown := sorted(str(name) for name in set(values) - known):
        raise UsageError(
            f"Expected known configuration entries, got {', '.join(unknown)}.",
            f"Choose from {', '.join(sorted(known))}.",
        )
    if missing := sorted(set(required) - set(values)):
        raise UsageError(f"The configuration lacks {', '.join(missing)}.", "Add the entries.")


_DOCUMENT_POOLINGS = ("mean", "attention", "max", "logsumexp", "top_k")
_POOLINGS = (*_DOCUMENT_POOLINGS, "none")


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The configuration of one output of a model.

    Attributes:
        problem_type: the task of the output, by the names of transformers; one of
            ``aftexport.heads.HEADS``.
        num_labels: number of outputs: of classes, of values, or 1 for a binary classification;
            None for feature_extraction, whose vectors have ``dim`` numbers.
        pooling: the reduction of the tokens to one vector: mean, attention, max, logsumexp or
            top_k; none for the vector or the values of each token, in feature_extraction and
            regression. A token_classification pools nothing.
        pooling_temperature: the temperature of logsumexp, a positive number; None for a learned
            one.
        pooling_k: the number of the largest values of each channel, whose mean is top_k.

    Raises:
        UsageError: if a value is not one of the choices or not a count, or two values do not fit
            together.
    """

    problem_type: str = "single_label_classification"
    num_labels: int | None = None
    pooling: str = "mean"
    pooling_temperature: float | None = None
    pooling_k: int | None = None

    def __post_init__(self) -> None:
        check_choice("problem_type", self.problem_type, tuple(HEADS))
        check_choice("pooling", self.pooling, _POOLINGS)
        is_vector = not HEADS[self.problem_type].is_named
        check_count("num_labels", self.num_labels, is_optional=is_vector)
        if is_vector and self.num_labels is not None:
            raise UsageError(
                f"num_labels must be null for {self.problem_type}, got {self.num_labels}.",
                "Set dim to the number of numbers in a vector.",
            )
        if self.pooling == "none" and not self.is_per_token:
            check_choice(f"pooling of {self.problem_type}", self.pooling, _DOCUMENT_POOLINGS)
        self._check_option("pooling_temperature", "logsumexp")
        self._check_option("pooling_k", "top_k")
        check_count("pooling_k", self.pooling_k, is_optional=self.pooling != "top_k")
        temperature = self.pooling_temperature
        if temperature is not None and not (
            type(temperature) in (int, float) and 0 < temperature < math.inf
        ):
            raise UsageError(
                f"pooling_temperature must be a positive number or null, got {temperature!r}.",
                "Give a positive number, or null for a learned temperature.",
            )

    def _check_option(self, name: str, pooling: str) -> None:
        """Raise UsageError if an option is given for another pooling than its own."""
        if self.pooling != pooling and getattr(self, name) is not None:
            raise UsageError(
                f"{name} must be null for the pooling {self.pooling}, got {getattr(self, name)!r}.",
                f"Leave it out, or choose the pooling {pooling}.",
            )

    @property
    def is_per_token(self) -> bool:
        """Whether the output has a row for each token of a document."""
        kind = HEADS[self.problem_type]
        if not issubclass(kind, TokenHead):
            return False
        return self.pooling == "none" or not kind.takes_documents

    def head(self, dim: int, names: Sequence[str] | None) -> Head:
        """Return the meaning of the output.

        Args:
            dim: the channels of the model.
            names: the names of the classes or values; None for numbered names.

        Raises:
            UsageError: if the names do not fit.
        """
        width = dim if self.num_labels is None else self.num_labels
        shape = (1, 1, width) if self.is_per_token else (1, width)
        return HEADS[self.problem_type].of_output(shape, names)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(EncoderConfig):
    """Configuration of ``DocumentClassifier``.

    The attributes are those of ``EncoderConfig`` and those of ``HeadConfig``.
    """

    num_labels: int | None = None
    pooling: str = "mean"
    pooling_temperature: float | None = None
    pooling_k: int | None = None
    problem_type: str = "single_label_classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.head_config  # checks its values

    @property
    def head_config(self) -> HeadConfig:
        """The configuration of the output."""
        return HeadConfig(**{f.name: getattr(self, f.name) for f in fields(HeadConfig)})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a configuration; raise UsageError if a name is unknown or missing."""
        is_vector = values.get("problem_type") == "feature_extraction"
        check_entries(
            cls, values, ["mechanism", *required_tokens(values), *["num_labels"][is_vector:]]
        )
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class MultiHeadConfig(EncoderConfig):
    """Configuration of ``MultiHeadClassifier``.

    The other attributes are those of ``EncoderConfig``.

    Attributes:
        heads: the configuration of each output, by its name.
    """

    heads: Mapping[str, HeadConfig]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.heads:
            raise UsageError("heads must have at least one output, got none.", "Add an output.")
        for name in self.heads:
            if not _NAME.fullmatch(name) or name in (*AXES, EVIDENCE):
                raise UsageError(
                    "heads must be named by 1 to 64 letters, digits and underscores, and not as "
                    f"an input or {EVIDENCE}, got {name[:80]!r}.",
                    "Rename the output.",
                )

    def meanings(self, names: Mapping[str, Any] | None) -> dict[str, Head]:
        """Return the meaning of each output.

        Args:
            names: the names of each output's classes or values; None for numbered names.

        Raises:
            UsageError: if the names do not fit, or are of an unknown output.
        """
        names = {} if names is None else names
        if unknown := sorted(set(names) - set(self.heads)):
            raise UsageError(
                f"Expected labels of the outputs {', '.join(self.heads)}, got those of "
                f"{', '.join(unknown)}.",
                "Correct the name of the output.",
            )
        return {name: head.head(self.dim, names.get(name)) for name, head in self.heads.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return a configuration; raise UsageError if a name is unknown or missing."""
        check_entries(cls, values, ["mechanism", *required_tokens(values), "heads"])
        heads = values["heads"]
        if not isinstance(heads, Mapping) or not all(
            isinstance(h, Mapping) for h in heads.values()
        ):
            raise UsageError(
                "heads must be a mapping of each output's name to its configuration, got "
                f"{str(heads)[:80]}.",
                "Write heads as {name: {problem_type: ..., num_labels: ...}}.",
            )
        for head in heads.values():
            check_entries(HeadConfig, head, [])
        return cls(**{**values, "heads": {name: HeadConfig(**h) for name, h in heads.items()}})
