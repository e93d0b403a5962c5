"""The causal convolution of each channel before the recurrence, ``causal_conv1d_fn``."""

from typing import Any

from torch import Tensor

from aftexport.capture.module_translations.function_translation import FunctionTranslation
from aftexport.nn.functional import causal_depthwise_conv

_ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def _convolved(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    own = _ACTIVATIONS.get(activation, "none")
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    output = causal_depthwise_conv(x, weight, bias, activation=own)[0].transpose(1, 2)
    if activation not in _ACTIVATIONS:
        from transformers.activations import ACT2FN  # loaded by the model

        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype)


CAUSAL_CONVOLUTION = FunctionTranslation(
    "causal_conv1d_fn",
    ("hidden_states", "weight", "bias", "activation"),
    _convolved,
    has_loop=False,
)
