"""Shapes and settings that do not fit are refused with the operator's and the tensor's name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aftexport.operators.torch_ops import OPERATORS

from .cases import ONE_GATE, Case, Variant, as_tensors, make_inputs

CASE = Case("bad", 6, (6, 4), window=3, spare=0)


def arguments(op_type: str, **changes: Callable[[Any], Any]) -> list[Any]:
    """Return fitting arguments in order, some of them changed."""
    variant = next(v for v in ONE_GATE if v.op_type == op_type)
    tensors = as_tensors(make_inputs(variant.operator, CASE))
    fitting = dict(zip(variant.operator.required_inputs, tensors, strict=True))
    fitting |= variant.attributes(CASE.heads)
    return [changes.get(name, lambda x: x)(value) for name, value in fitting.items()]


EVERY = [
    ("lengths", lambda x: x.int(), "lengths .*int32"),
    ("lengths", lambda x: x[:1], "lengths"),
    ("lengths", lambda x: x[:, None], "lengths"),
    ("query", lambda x: x.long(), "query .*int64"),
    ("value", lambda x: x > 0, "value .*bool"),
    ("query", lambda x: x[:, :5], "query"),
    ("query", lambda x: x[0], "query"),
    ("value", lambda x: x[:, :5], "value"),
    ("value", lambda x: x[:1], "value"),
    ("value", lambda x: x[..., :7], "value"),
    ("key", lambda x: x[:, :5], "key"),
    ("key", lambda x: x[:1], "key"),
    ("key", lambda x: x[..., :1], "key"),
    ("key", lambda x: x[0], "key"),
]
SETTINGS = [
    (name, value)
    for name in ("gate", "normalization", "feature_map")
    for value in ("", "unknown", "Sigmoid")
]
HEADS = [
    (op_type, value)
    for op_type, operator in OPERATORS.items()
    for a in operator.attributes
    for value in (3, 0, -2, 16)
    if a.name == "num_heads" and value != a.default
]
PARTICULAR = [
    ("AftFull", "position_bias", lambda x: x[:, :5]),
    ("AftFull", "position_bias", lambda x: x[:5, :5]),
    ("AftFull", "position_bias", lambda x: x[None]),
    ("CausalAftFull", "position_bias", lambda x: x[:5, :5]),
    ("AftLocal", "band", lambda x: x[:, :4]),
    ("AftLocal", "band", lambda x: x[:5]),
    ("AftLocal", "band", lambda x: x[0]),
    ("AftLocal", "band", lambda x: x[:, :0]),
    ("AftLocal", "band", lambda x: x[:0]),
    ("CausalAftLocal", "band", lambda x: x[:5]),
    ("CausalAftLocal", "band", lambda x: x[:, :0]),
    ("CausalAftLocal", "band", lambda x: x[None]),
    ("AftConv", "key", lambda x: torch.cat((x, x), 2)),
    ("AftConv", "filter", lambda x: x[:1]),
    ("AftConv", "filter", lambda x: x[0]),
    ("AftConv", "filter", lambda x: x[:, :0]),
    ("CausalAftConv", "filter", lambda x: x[:1]),
    ("CausalAftConv", "filter", lambda x: x[:, :0]),
    ("Fastformer", "alpha_weight", lambda x: x[:6]),
    ("Fastformer", "alpha_weight", lambda x: x[:, :1]),
    ("Fastformer", "beta_weight", lambda x: x.T),
    ("Fastformer", "beta_weight", lambda x: x[0]),
    ("CausalFastformer", "beta_weight", lambda x: x[:, :1]),
    ("AftSimple", "eps", lambda _: -1e-6),
    ("CausalAftConv", "eps", lambda _: float("nan")),
    ("AftFull", "eps", lambda _: float("inf")),
    ("EfficientAttention", "kv_num_heads", lambda _: 3),
    ("NormalizedLinearAttention", "kv_num_heads", lambda _: -1),
    ("NormalizedLinearAttention", "eps", lambda _: 0.0),
    ("NormalizedLinearAttention", "eps", lambda _: -1e-6),
    ("NormalizedLinearAttention", "eps", lambda _: float("nan")),
    ("CausalNormalizedLinearAttention", "eps", lambda _: float("inf")),
]


@pytest.mark.parametrize(("name", "change", "message"), EVERY)
@pytest.mark.parametrize("op_type", OPERATORS)
def test_disagreeing_tensors_are_refused(
    op_type: str, name: str, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{op_type}: .*{message}"):
        OPERATORS[op_type].torch_op(*arguments(op_type, **{name: change}))


@pytest.mark.parametrize(("name", "value"), SETTINGS)
@pytest.mark.parametrize("op_type", OPERATORS)
def test_unknown_settings_error_lists_known_ones(op_type: str, name: str, value: str) -> None:
    setting = next((a for a in OPERATORS[op_type].settings if a.name == name), None)
    if setting is None:
        return
    choices = ", ".join(setting.choices)
    with pytest.raises(
        ValueError, match=f"^{op_type}: {name} must be one of {choices}, got '{value}'"
    ):
        OPERATORS[op_type].torch_op(*arguments(op_type, **{name: lambda _: value}))


@pytest.mark.parametrize(("op_type", "value"), HEADS)
def test_heads_must_divide_channels(op_type: str, value: int) -> None:
    with pytest.raises(
        ValueError, match=f"^{op_type}: num_heads must divide the 8 channels, got {value}"
    ):
        OPERATORS[op_type].torch_op(*arguments(op_type, num_heads=lambda _: value))


@pytest.mark.parametrize(("op_type", "name", "change"), PARTICULAR)
def test_unfit_learned_tensors_are_refused(
    op_type: str, name: str, change: Callable[[Any], Any]
) -> None:
    with pytest.raises(ValueError, match=f"^{op_type}: .*{name}"):
        OPERATORS[op_type].torch_op(*arguments(op_type, **{name: change}))


@pytest.mark.parametrize(("op_type", "name"), [("AftFull", "position_bias"), ("AftLocal", "band")])
def test_excess_tokens_error_names_both_numbers(op_type: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{op_type}: 6 tokens, but {name} .* at most 5"):
        OPERATORS[op_type].torch_op(*arguments(op_type, **{name: lambda x: x[:5, :5]}))


@pytest.mark.parametrize("eps", [-1e-6, float("inf")])
def test_eps_error_names_both_bounds(eps: float) -> None:
    for op_type, least in (("AftSimple", "at least 0"), ("NormalizedLinearAttention", "positive")):
        with pytest.raises(ValueError, match=f"eps must be finite and {least}, got {eps}"):
            OPERATORS[op_type].torch_op(*arguments(op_type, eps=lambda _: eps))


@pytest.mark.parametrize("variant", ONE_GATE, ids=str)
def test_tracing_refuses_bad_shapes(variant: Variant) -> None:
    bad = arguments(variant.op_type, value=lambda x: x[:, :5])
    on_meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in bad]
    with pytest.raises(ValueError, match=f"^{variant.op_type}: value"):
        variant.operator.torch_op(*on_meta)
