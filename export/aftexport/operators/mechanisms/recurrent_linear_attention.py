"""Recurrent linear attention: a state of key^T value, with decay and the delta rule.

    S[t] = exp(g[t]) S[t-1] + K[t]^T V'[t],  Y[t] = scale Q[t] S[t]

V' is V, or with the delta rule beta[t] (V[t] - K[t] exp(g[t]) S[t-1]). This is the ONNX operator
``LinearAttention`` (opset 27): Yang et al., Gated Linear Attention, arXiv 2312.06635, eq. 3, and
Gated Delta Networks, arXiv 2412.06464, eq. 10. Beyond it, there are lengths, directions and a
normalizer. Runtimes match built-in operators only by name, so this one has a name of its own.
"""

from collections.abc import Mapping
from typing import Any

import onnx

from aftexport.operators.mechanisms._recurrence import DELTA_RULES, GATED_RULES, recurrence_body
from aftexport.operators.mechanisms.linear_attention import MIN_EPS
from aftexport.operators.mechanisms.mechanism import MechanismOperator
from aftexport.operators.schema import STATE_OUTPUT, Attribute

__all__ = ["DELTA_RULES", "GATED_RULES", "RECURRENT_LINEAR_ATTENTION"]

ATTRIBUTES = (
    Attribute(
        "update_rule",
        "gated_delta",
        "gated: with decay; delta: with beta, which corrects the value that the key retrieves.",
        ("linear", "gated", "delta", "gated_delta"),
    ),
    Attribute(
        "direction",
        "forward",
        "Order of the tokens. bidirectional: the sum of both directions, each token once.",
        ("forward", "reverse", "bidirectional"),
    ),
    Attribute(
        "normalizer",
        "none",
        "sum: divides by the product of the query with the decayed sum of keys, plus eps; "
        "only for linear and gated.",
        ("none", "sum"),
    ),
    Attribute(
        "decay_granularity",
        "head",
        "head: one decay for each head; channel: one for each channel of the key.",
        ("head", "channel"),
    ),
    Attribute("q_num_heads", 1, "Number of query heads; a multiple of kv_num_heads."),
    Attribute(
        "kv_num_heads",
        1,
        "Number of heads of keys, values and states. Query head i reads the state of head "
        "i // (q_num_heads / kv_num_heads).",
    ),
    Attribute("scale", 0.0, "Factor of the output; 0 means 1 / sqrt(dk). A normalizer cancels it."),
    Attribute(
        "eps",
        1e-6,
        f"Added to the normalizer; keeps it from being zero. Below {MIN_EPS:g} it counts as that.",
    ),
)


def _sizes(attributes: Mapping[str, Any]) -> dict[str, int]:
    heads, channels = int(attributes["kv_num_heads"]), 8
    is_summed = attributes["normalizer"] == "sum"
    by_channel = attributes["decay_granularity"] == "channel"
    return {
        "QD": int(attributes["q_num_heads"]) * channels,
        "KD": heads * channels,
        "VD": heads * channels,
        "H": heads,
        "G": heads * channels if by_channel else heads,
        "S": heads * (2 if attributes["direction"] == "bidirectional" else 1),
        "dk": channels,
        "E": channels + is_summed,
    }


def _nonnegative(attributes: Mapping[str, Any]) -> dict[str, int]:
    """Return the inputs whose products are the terms of a divisor, which could cancel.

    Of the state, only the last column enters the divisor.
    """
    is_summed = attributes["normalizer"] == "sum"
    return {"query": 0, "key": 0, "past_state": -1} if is_summed else {}


RECURRENT_LINEAR_ATTENTION = MechanismOperator(
    op_type="RecurrentLinearAttention",
    stem="recurrent_linear_attention",
    inputs=("query", "key", "value", "past_state", "decay", "beta", "lengths"),
    shapes=("B T QD", "B T KD", "B T VD", "B S dk E", "B T G", "B T H", "B"),
    libraries=("onnxruntime",),
    optional=("past_state", "decay", "beta"),
    outputs=("output", STATE_OUTPUT),
    exponents=(),
    ranges={"key": (-0.5, 0.5), "decay": (-1.0, 0.0), "beta": (0.0, 1.0)},
    attributes=ATTRIBUTES,
    body=recurrence_body,
    sizes=_sizes,
    nonnegative=_nonnegative,
    doc="Recurrent linear attention (arXiv 2312.06635, arXiv 2412.06464): query [B, T, Hq dk], "
    "key [B, T, H dk], value [B, T, H dv], decay in log space [B, T, H] or [B, T, H dk], beta "
    "[B, T, H] or [B, T, 1]. past_state and present_state are [B, S, dk, E]: E is dv, or dv + 1 "
    "with a normalizer, whose sum is the last column; S is H, or 2 H if bidirectional, the "
    "forward states first.",
)
onnx.defs.register_schema(RECURRENT_LINEAR_ATTENTION.schema())
