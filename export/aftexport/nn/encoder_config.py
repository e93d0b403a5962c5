"""The configuration of an encoder of token ids, or of features, and checks of its values."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from aftexport.errors import UsageError
from aftexport.operators.mechanisms import MECHANISMS

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
