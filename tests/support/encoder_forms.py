"""Forms of the encoder's operators: attributes, and which optional inputs a node has."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Form:
    """An operator with some attributes, without some of its optional inputs."""

    op: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    absent: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return " ".join(
            [self.op, *self.attributes.values(), *(f"-{n}" for n in sorted(self.absent))]
        )


def form(op: str, absent: str = "", **attributes: str) -> Form:
    return Form(op, attributes, frozenset(absent.split()))


NO_NORM = "norm_weight norm_bias"
NO_BIASES = "norm_bias bias_in bias_out bias_up"
"""The parameters of a norm, and the biases of layers without one."""

PLAIN = [
    form("LayerNormLinear"),
    form("LayerNormQueryKeyValue"),
    form("LayerNormFeedForward", "weight_up bias_up"),
    form("LinearResidual"),
]
NORMED = [
    *PLAIN[:-1],
    form("LayerNormLinear", "norm_bias bias"),
    form("LayerNormLinear", "norm_bias", norm="rms"),
    form("LayerNormLinear", norm="rms"),
    form("LayerNormQueryKeyValue", "norm_bias query_bias value_bias"),
    form("LayerNormQueryKeyValue", "norm_bias key_bias", norm="rms"),
    form("LayerNormFeedForward", NO_BIASES),
    form("LayerNormFeedForward", "norm_bias", norm="rms", activation="silu"),
    form("LayerNormFeedForward", NO_BIASES, norm="rms", activation="silu"),
    form("LayerNormFeedForward", "bias_up", activation="gelu_tanh"),
    form("LayerNormFeedForward", "weight_up bias_up", activation="gelu_tanh"),
    form("LayerNormFeedForward", "weight_up bias_up bias_in", activation="relu"),
]
FORMS = [
    *NORMED,
    PLAIN[-1],
    form("LayerNormLinear", NO_NORM),
    form("LayerNormLinear", f"{NO_NORM} bias"),
    form("LayerNormQueryKeyValue", NO_NORM),
    form("LayerNormFeedForward", f"{NO_NORM} weight_up bias_up"),
    form("LayerNormFeedForward", f"{NO_NORM} {NO_BIASES}", activation="silu"),
    form("LinearResidual", "bias"),
]
