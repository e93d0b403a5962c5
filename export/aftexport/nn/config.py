"""What a document classifier is made of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from aftexport.errors import UsageError
from aftexport.operators.mechanisms import MECHANISMS

LAYERS = (*MECHANISMS, "dot_product_attention")
_CHOICES = {
    "mechanism": LAYERS,
    "pooling": ("mean", "attention"),
    "gate": ("sigmoid", "tanh", "none"),
    "normalization": ("softmax", "scaling"),
    "feature_map": ("elu", "relu"),
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
"""The bytes of a matrix of the largest counts fit into 64 bits."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Configuration of ``DocumentClassifier``.

    Attributes:
        mechanism: what mixes the tokens; one of ``LAYERS``.
        vocab_size: number of token ids.
        num_labels: number of classes.
        dim: channels D.
        depth: encoder layers.
        num_heads: heads, where the mechanism has them.
        ffn_dim: hidden channels of the feed-forward network.
        max_length: most tokens, where positions are learned (aft_full; aft_local
            with a bias for each pair). None: any number.
        window: s of aft_local, taps of aft_conv.
        bias_rank: columns of the position-bias factors.
        causal: a token sees itself and what came before it.
        pooling: how tokens become one vector, mean or attention.
        gate: of the AFT mechanisms.
        normalization: of efficient_attention.
        feature_map: of linear_attention.

    Raises:
        UsageError: for a value that is none of the choices, no whole number of 1 to 67,108,864, or
            does not go with another.
    """

    mechanism: str
    vocab_size: int
    num_labels: int
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

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} is {value!r}.", f"Choose one of {', '.join(choices)}.")
        for name in _COUNTS:
            value = getattr(self, name)
            if not _is_count(value) and not (name == "max_length" and value is None):
                remedy = "Give a positive whole number"
                remedy += ", or null." if name == "max_length" else "."
                raise UsageError(f"{name} is {value!r}.", remedy)
            if value is not None and value > _MAX_COUNT:
                raise UsageError(f"{name} is {value}.", f"Give at most {_MAX_COUNT}.")
        if not isinstance(self.causal, bool):
            raise UsageError(f"causal is {self.causal!r}.", "Give true or false.")
        if self.dim % self.num_heads:
            raise UsageError(
                f"num_heads {self.num_heads} does not divide dim {self.dim}.",
                "Choose a number of heads that does.",
            )
        if self.mechanism == "aft_full" and self.max_length is None:
            raise UsageError(
                "aft_full learns a bias for every pair of positions and needs max_length.",
                "Set max_length to the longest document, in tokens.",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads a configuration; raises UsageError for names it does not know or lacks."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(str(name) for name in set(values) - known):
            raise UsageError(
                f"The configuration has unknown entries: {', '.join(unknown)}.",
                f"Known are {', '.join(sorted(known))}.",
            )
        required = {"mechanism", "vocab_size", "num_labels"}
        if missing := sorted(required - set(values)):
            raise UsageError(f"The configuration lacks {', '.join(missing)}.", "Add them.")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as JSON-ready values."""
        return asdict(self)
