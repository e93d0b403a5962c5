"""A causal convolution of each channel on its own, with a state.

    Y[t] = activation(bias + sum_j weight[:, j] X[t - K + 1 + j])

The short convolution of Mamba (arXiv 2312.00752, section 3.4) and its successors. X before the
first token is ``past_state``, or 0. The ONNX operator ``CausalConvWithState`` (opset 27) has
the channels before the tokens. Runtimes match built-in operators only by name, so this operator is
``CausalDepthwiseConv``.
"""

from collections.abc import Mapping
from typing import Any

import onnx

from aftexport.operators import onnx_text as text
from aftexport.operators.schema import STATE_OUTPUT, Attribute, MechanismOperator, as_float

_ACTIVATION = Attribute(
    "activation", "none", "Function of the result; silu: x sigmoid(x).", ("none", "silu")
)


def _body(*, activation: str, present: frozenset[str]) -> str:
    floats = ("input", "weight", *(n for n in ("bias", "past_state") if n in present))
    lines = text.common_constants() + as_float(*floats)
    lines += _inputs_body("past_state" in present) + _sum_of_taps_body()
    if "bias" in present:
        lines += "biased = Add(total_last, bias_f)\n"
    else:
        lines += "biased = Identity(total_last)\n"
    if activation == "silu":
        lines += "gate = Sigmoid(biased)\nactive = Mul(biased, gate)\n"
    else:
        lines += "active = Identity(biased)\n"
    return (
        lines
        + f"""
        rows = Where(valid, active, zero_f)
        output = CastLike(rows, input)
        state_count = Squeeze(before)
        state_places = Range(zero, state_count, one)
        state_rows = Add(lengths_column, state_places)
        state_index = Unsqueeze(state_rows, axis2)
        state = GatherND <batch_dims = 1> (all_inputs, state_index)
        {STATE_OUTPUT} = CastLike(state, input)
    """
    )


def _inputs_body(has_past: bool) -> str:
    """Define ``all_inputs [B, K - 1 + T, C]``, with 0 at padding, and ``valid [B, T, 1]``."""
    lines = """
        tokens = Shape <start = 1, end = 2> (input)
        taps = Shape <start = 1, end = 2> (weight)
        before = Sub(taps, one_1d)
        end = Squeeze(tokens)
        positions = Range(zero, end, one)
        no_length = Unsqueeze(zero, zero)
        long_lengths = Min(lengths, tokens)
        inside_lengths = Max(long_lengths, no_length)
        lengths_column = Unsqueeze(inside_lengths, axis1)
        valid_rows = Less(positions, lengths_column)
        valid = Unsqueeze(valid_rows, axis2)
        inputs = Where(valid, input_f, zero_f)
    """
    if not has_past:
        lines += """
            batch = Shape <start = 0, end = 1> (input)
            channels = Shape <start = 2, end = 3> (input)
            state_shape = Concat <axis = 0> (batch, before, channels)
            past_state_f = ConstantOfShape <value = float[1] {0.0}> (state_shape)
        """
    return lines + "all_inputs = Concat <axis = 1> (past_state_f, inputs)\n"


def _sum_of_taps_body() -> str:
    """Define ``total_last [B, T, C]``, the products with the taps, added one tap after another."""
    lines = """
        tap_rows = Transpose <perm = [1, 0]> (weight_f)
        input_shape = Shape(input)
        start = ConstantOfShape <value = float[1] {0.0}> (input_shape)
        tap_count = Squeeze(taps)
    """
    step = """
        tap_positions = Add(positions, tap)
        tap_inputs = Gather <axis = 1> (all_inputs, tap_positions)
        tap_row = Gather <axis = 0> (tap_rows, tap)
        tap_product = Mul(tap_inputs, tap_row)
        total_next = Add(total, tap_product)
    """
    return lines + text.loop(
        step, count="tap_count", index="tap", states={"total": "start"}, ranks={"total": 3}
    )


def _sizes(_: Mapping[str, Any]) -> dict[str, int]:
    return {"C": 16, "K": 4, "P": 3}


CAUSAL_DEPTHWISE_CONV = MechanismOperator(
    op_type="CausalDepthwiseConv",
    stem="causal_depthwise_conv",
    inputs=("input", "weight", "bias", "past_state", "lengths"),
    shapes=("B T C", "C K", "C", "B P C", "B"),
    libraries=("onnxruntime",),
    optional=("bias", "past_state"),
    outputs=("output", STATE_OUTPUT),
    exponents=(),
    attributes=(_ACTIVATION,),
    body=_body,
    sizes=_sizes,
    doc="Causal convolution of each channel (arXiv 2312.00752): input [B, T, C], weight [C, K], "
    "bias [C], past_state [B, P, C] with P = K - 1. present_state has the last P inputs "
    "within lengths.",
)
onnx.defs.register_schema(CAUSAL_DEPTHWISE_CONV.schema())
