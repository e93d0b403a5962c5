"""Small graphs with the recurrent operators of ONNX, ONNX Runtime or our domain."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from aftexport.operators.domain import DOMAIN, VERSION
from aftexport.operators.portable_bodies import attach_bodies

MICROSOFT = "com.microsoft"
RULES = ("linear", "gated", "delta", "gated_delta")
"""The update rules; ``has_decay`` and ``has_beta`` tell the inputs that each takes."""
KEY_WIDTH, VALUE_WIDTH, CHANNELS, TAPS = 4, 3, 6, 3
BATCH = 3
_OPSETS = {"": 27, MICROSOFT: 20, DOMAIN: 20}
_FLOAT = TensorProto.FLOAT


def has_decay(rule: str) -> bool:
    return "gated" in rule


def has_beta(rule: str) -> bool:
    return "delta" in rule


def linear_attention(
    domain: str,
    *,
    rule: str = "gated_delta",
    heads: tuple[int, int] = (4, 2),
    has_state: bool = False,
    by_channel: bool = False,
    shared_beta: bool = False,
    state_type: int = _FLOAT,
    own_type: int = _FLOAT,
    absent: Sequence[str] = (),
    lengths: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a graph of one node, in the domain of ONNX, of ONNX Runtime, or this project's.

    ``heads`` are the numbers of query heads and of states. ``absent`` names inputs that are left
    out against the rule. ``lengths`` are an input of our operator only.
    """
    queries, states = heads
    state = ["B", states, KEY_WIDTH, VALUE_WIDTH]
    shapes: dict[str, list[object]] = {
        "query": ["B", "T", queries * KEY_WIDTH],
        "key": ["B", "T", states * KEY_WIDTH],
        "value": ["B", "T", states * VALUE_WIDTH],
        "past_state": state if has_state else [],
        "decay": ["B", "T", states * (KEY_WIDTH if by_channel else 1)] if has_decay(rule) else [],
        "beta": ["B", "T", 1 if shared_beta else states] if has_beta(rule) else [],
        "lengths": ["B"] if lengths else [],
    }
    names = [name if shape and name not in absent else "" for name, shape in shapes.items()]
    if domain != DOMAIN:
        names.pop()
    else:
        attributes["decay_granularity"] = "channel" if by_channel else "head"
    types = {"past_state": state_type, "lengths": TensorProto.INT64}
    inputs = [
        helper.make_tensor_value_info(name, types.get(name, own_type), shapes[name])
        for name in names
        if name
    ]
    node = helper.make_node(
        "RecurrentLinearAttention" if domain == DOMAIN else "LinearAttention",
        names,
        ["output", "present_state"],
        name="attention",
        domain=domain,
        **({"update_rule": rule, "q_num_heads": queries, "kv_num_heads": states} | attributes),
    )
    width = max(queries, states) * VALUE_WIDTH
    outputs = [
        helper.make_tensor_value_info("output", own_type, ["B", "T", width]),
        helper.make_tensor_value_info("present_state", state_type, state),
    ]
    return _model(domain, [node], inputs, outputs, [])


def causal_conv(
    domain: str,
    *,
    has_bias: bool = False,
    has_state: bool = False,
    is_last: bool = False,
    taps: int = TAPS,
    span: int | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a graph of one node, in the domain of ONNX, of ONNX Runtime, or this project's.

    ``span`` is the number of tokens of the state, by default that of a filter without dilation.
    """
    own = domain == DOMAIN
    before = taps - 1 if span is None else span
    is_last = is_last or own
    x = ["B", "T", CHANNELS] if is_last else ["B", CHANNELS, "T"]
    state = ["B", before, CHANNELS] if is_last else ["B", CHANNELS, before]
    filters = _random(0).standard_normal((CHANNELS, taps) if own else (CHANNELS, 1, taps))
    constants = [numpy_helper.from_array(filters.astype(np.float32), "weight")]
    if has_bias:
        bias = _random(1).standard_normal(CHANNELS).astype(np.float32)
        constants.append(numpy_helper.from_array(bias, "bias"))
    inputs = [helper.make_tensor_value_info("input", _FLOAT, x)]
    if has_state:
        inputs.append(helper.make_tensor_value_info("past_state", _FLOAT, state))
    names = ["input", "weight", "bias" if has_bias else "", "past_state" if has_state else ""]
    if own:
        inputs.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["B"]))
        names.append("lengths")
    node = helper.make_node(
        "CausalDepthwiseConv" if own else "CausalConvWithState",
        names,
        ["output", "present_state"],
        name="convolution",
        domain=domain,
        **attributes,
    )
    outputs = [
        helper.make_tensor_value_info("output", _FLOAT, x),
        helper.make_tensor_value_info("present_state", _FLOAT, state),
    ]
    return _model(domain, [node], inputs, outputs, constants)


def _model(domain: str, *parts: Any) -> onnx.ModelProto:
    nodes, inputs, outputs, constants = parts
    graph = helper.make_graph(nodes, "recurrence", inputs, outputs, constants)
    imports = [helper.make_opsetid("", _OPSETS[domain])]
    if domain:
        imports.append(helper.make_opsetid(domain, VERSION))
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return attach_bodies(model) if domain == DOMAIN else model


def inputs_of(model: onnx.ModelProto, tokens: int = 7) -> dict[str, np.ndarray]:
    """Return random inputs with a batch of three, whose lengths are all, a part and none."""
    random, inputs = _random(tokens), {}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        sizes = {"B": BATCH, "T": tokens}
        shape = [sizes.get(dim.dim_param, dim.dim_value) for dim in tensor.shape.dim]
        numbers = random.standard_normal(shape)
        if value.name == "decay":
            numbers = -np.abs(numbers)
        elif value.name == "beta":
            numbers = 1.0 / (1.0 + np.exp(-numbers))
        elif value.name == "lengths":
            numbers = np.array([tokens, tokens // 2, 0])
        inputs[value.name] = numbers.astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return inputs


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
