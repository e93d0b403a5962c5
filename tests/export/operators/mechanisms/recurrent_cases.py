"""Forms of the operators with a state, their inputs, and models of one node."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from one_node import OneNode
from recurrent_graphs import RULES, has_beta, has_decay

from aftexport.operators.torch_ops import RECURRENT_OPERATORS, Operator

Arrays = dict[str, np.ndarray]
ATTENTION = RECURRENT_OPERATORS["RecurrentLinearAttention"]
CONVOLUTION = RECURRENT_OPERATORS["CausalDepthwiseConv"]


@dataclass(frozen=True)
class Form:
    """Settings of recurrent linear attention with the presence of a past state."""

    update_rule: str = "gated_delta"
    direction: str = "forward"
    normalizer: str = "none"
    decay_granularity: str = "head"
    has_past: bool = True
    q_num_heads: int = 4
    kv_num_heads: int = 2

    def __str__(self) -> str:
        past = "past" if self.has_past else "new"
        names = (self.update_rule, self.direction, self.normalizer, self.decay_granularity, past)
        return "-".join(names)

    @property
    def attributes(self) -> dict[str, int | float | str]:
        values = {"scale": 0.0, "eps": 1e-3} | self.__dict__
        return {a.name: values[a.name] for a in ATTENTION.attributes}


FORMS = [
    Form(rule, direction, normalizer, granularity, has_past)
    for rule, direction, normalizer, granularity, has_past in product(
        RULES,
        ("forward", "reverse", "bidirectional"),
        ("none", "sum"),
        ("head", "channel"),
        (False, True),
    )
    if (has_decay(rule) or granularity == "head") and (not has_beta(rule) or normalizer == "none")
]
"""Every choice of settings, with and without a past state."""


def absent_inputs(form: Form) -> set[str]:
    """Return the optional inputs that a node of this form lacks."""
    rule = form.update_rule
    present = {"past_state": form.has_past, "decay": has_decay(rule), "beta": has_beta(rule)}
    return {name for name, is_present in present.items() if not is_present}


def draw(
    form: Form, tokens: int, lengths: tuple[int, ...], *, widths: tuple[int, int] = (6, 5)
) -> Arrays:
    """Draw inputs that float16 holds; the same ones for the same arguments.

    With a normalizer the features are positive. Keys have a norm of about 1, as in models.
    """
    rng = np.random.default_rng(zlib.crc32(f"{form} {tokens} {lengths}".encode()))
    batch, heads, (dk, dv) = len(lengths), form.kv_num_heads, widths
    is_summed = form.normalizer == "sum"
    states = heads * (2 if form.direction == "bidirectional" else 1)
    inputs = {
        "query": rng.normal(size=(batch, tokens, form.q_num_heads * dk)),
        "key": rng.normal(size=(batch, tokens, heads * dk)) / np.sqrt(dk),
        "value": rng.normal(size=(batch, tokens, heads * dv)),
        "past_state": rng.normal(size=(batch, states, dk, dv + is_summed)),
        "decay": -rng.gamma(1.0, 0.3, (batch, tokens, heads * dk)),
        "beta": rng.uniform(size=(batch, tokens, heads)),
    }
    if form.decay_granularity == "head":
        inputs["decay"] = inputs["decay"][..., :heads]
    if is_summed:
        inputs["query"], inputs["key"] = abs(inputs["query"]), abs(inputs["key"])
        inputs["past_state"][..., -1] = abs(inputs["past_state"][..., -1])
    absent = absent_inputs(form)
    kept = {n: x.astype(np.float16) for n, x in inputs.items() if n not in absent}
    return kept | {"lengths": np.array(lengths, np.int64)}


def typed(inputs: Arrays, dtype: str) -> Arrays:
    """Return the inputs with floating-point tensors of another type."""
    return {n: x.astype(dtype) if x.dtype.kind == "f" else x for n, x in inputs.items()}


def tensors_of(operator: Operator, inputs: Arrays) -> list[torch.Tensor | None]:
    """Return the inputs in the order of the operator; None for absent ones."""
    return [torch.from_numpy(inputs[n].copy()) if n in inputs else None for n in operator.inputs]


def run_definition(
    operator: Operator, inputs: Arrays, attributes: Mapping[str, object]
) -> list[np.ndarray]:
    """Run the definition in float64."""
    wide = tensors_of(operator, typed(inputs, "float64"))
    return [x.numpy() for x in operator.reference(*wide, **attributes)]


def run_torch(
    operator: Operator, inputs: Arrays, attributes: Mapping[str, object]
) -> list[np.ndarray]:
    """Run the torch op."""
    with torch.no_grad():
        results = operator.torch_op(*tensors_of(operator, inputs), *attributes.values())
    return [x.numpy() for x in results]


def error(results: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest ``max|y - ref| / max(1, max|ref|)`` of the outputs, padding included."""
    for result, reference in zip(results, expected, strict=True):
        assert result.shape == reference.shape
        assert np.isfinite(result).all()
    return max(
        float(abs(r.astype(np.float64) - e).max() / max(1.0, abs(e).max())) if e.size else 0.0
        for r, e in zip(results, expected, strict=True)
    )


def one_node(
    operator: Operator, inputs: Arrays, attributes: Mapping[str, object], opset: int = 20
) -> OneNode:
    return OneNode.for_inputs(operator.op_type, attributes, inputs, opset)
