"""Forms of the operators that the GPU kernels lack, with inputs for each."""

import zlib
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from one_node import OneNode
from oracles.mechanisms import MECHANISMS

from aftexport.operators.torch_ops import OPERATORS, Operator

Inputs = dict[str, np.ndarray]

_PARAMETERS = ("position_bias", "band", "filter")


@dataclass(frozen=True)
class Form:
    """An operator with attributes of version 2, and the sizes of its inputs.

    Attributes:
        op_type: the operator.
        attributes: those that differ from the defaults.
        heads, groups: heads of the query, and of key and value.
        width, value_width: channels of a head of key and of value.
        keys: number of keys; None for as many as queries.
        spread: largest magnitude of keys as logits, or of biases.
    """

    op_type: str
    attributes: tuple[tuple[str, Any], ...] = ()
    heads: int = 2
    groups: int = 2
    width: int = 4
    value_width: int = 4
    keys: int | None = None
    spread: float = 1.0
    operator: Operator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operator", OPERATORS[self.op_type])

    def __str__(self) -> str:
        named = "-".join(f"{name}_{value}" for name, value in self.attributes)
        sizes = f"{self.heads}x{self.width}-{self.groups}x{self.value_width}"
        return f"{self.op_type}-{named}-{sizes}-{self.keys}-{self.spread:g}"

    @property
    def causal(self) -> bool:
        return self.op_type.startswith("Causal")

    def all_attributes(self) -> dict[str, Any]:
        """Return the attributes by name, in the order of the torch op's arguments."""
        values = {a.name: a.default for a in self.operator.attributes} | dict(self.attributes)
        if "kv_num_heads" in values:
            values |= {"num_heads": self.heads, "kv_num_heads": self.groups}
        elif self.operator.stem == "aft_conv":
            values["num_heads"] = self.heads
        return values


def _linear_forms() -> list[Form]:
    maps = [("identity", n) for n in ("add", "clamp", "none")] + [
        ("elu", "clamp"),
        ("relu", "none"),
    ]
    settings = [
        (("feature_map", feature_map), ("normalizer", normalizer), ("eps", 0.25))
        for feature_map, normalizer in maps
    ]
    return [
        *_grouped_forms("NormalizedLinearAttention", settings),
        *_grouped_forms("NormalizedLinearAttention", [(("eps", 1e-3),)]),
        *_grouped_forms("EfficientAttention", [(("scale", 0.5),)]),
        *_grouped_forms("EfficientAttention", [(("normalization", "scaling"),)]),
    ]


def _grouped_forms(op_type: str, settings: list[tuple[tuple[str, Any], ...]]) -> list[Form]:
    sizes = [
        {},
        {"heads": 4, "groups": 2, "width": 3, "value_width": 5},
        {"heads": 3, "groups": 1, "width": 16, "value_width": 8},
        {"heads": 2, "groups": 2, "width": 17, "value_width": 33},
    ]
    keys = [{"keys": 1}, {"keys": 90, "heads": 4, "groups": 2, "width": 3, "value_width": 20}]
    return [
        *(Form(op_type, s, **size) for s, size in product(settings, sizes + keys)),
        *(Form(f"Causal{op_type}", s, **size) for s, size in product(settings, sizes)),
    ]


def _attention_free_forms() -> list[Form]:
    simple = [
        {"num_heads": 1, "gate": "relu"},
        {"num_heads": 2, "eps": 0.5},
        {"num_heads": 4, "gate": "none", "eps": 1e-6},
        {"num_heads": 8},
        {"eps": 0.5},
        {"eps": 1e-6, "gate": "tanh"},
    ]
    forms = [("AftSimple", attributes) for attributes in simple]
    forms += [(op_type, {"eps": 0.5}) for op_type in ("AftFull", "AftLocal", "AftConv")]
    return [
        Form(f"{prefix}{op_type}", tuple(attributes.items()), spread=spread)
        for prefix in ("", "Causal")
        for op_type, attributes in forms
        for spread in (1.0, 100.0)
    ]


FORMS = _linear_forms() + _attention_free_forms()
LENGTHS = [(1, (1, 0)), (7, (7, 3)), (65, (65, 40)), (150, (150, 149))]
"""Numbers of tokens, and the lengths of two documents."""


def make_inputs(form: Form, tokens: int, lengths: tuple[int, ...]) -> Inputs:
    """Draw inputs, the same ones for the same form and numbers of tokens."""
    random = np.random.default_rng(zlib.crc32(f"{form} {tokens}".encode()))
    batch, keys = len(lengths), tokens if form.keys is None else form.keys
    attributes = form.all_attributes()
    logits = form.operator.stem != "linear_attention"
    inputs = {
        "query": random.normal(size=(batch, tokens, form.heads * form.width)),
        "key": random.normal(size=(batch, keys, form.groups * form.width)),
        "value": random.normal(size=(batch, keys, form.groups * form.value_width)),
    }
    if form.operator.stem == "aft_simple" and attributes["num_heads"]:
        inputs["key"] = inputs["key"][..., : attributes["num_heads"]]
    if form.operator.stem == "aft_conv":
        inputs["key"] = inputs["key"][..., : form.heads]
    if logits:
        inputs["key"] = inputs["key"].clip(-2, 2) * form.spread / 2
    elif (attributes["feature_map"], attributes["normalizer"]) == ("identity", "add"):
        inputs["query"], inputs["key"] = np.abs(inputs["query"]), np.abs(inputs["key"])
    window = 4 if form.causal else 7
    shapes = {
        "position_bias": (tokens + 1, tokens + 1),
        "band": (tokens, window),
        "filter": (form.heads, 5),
    }
    for name in form.operator.required_inputs:
        if name in _PARAMETERS:
            inputs[name] = random.uniform(-form.spread, form.spread, shapes[name])
    given: Inputs = {name: x.astype(np.float32) for name, x in inputs.items()}
    given["lengths"] = np.array(lengths)
    if form.keys is not None:
        given["key_lengths"] = np.array([keys, *random.integers(0, keys + 1, batch - 1)])
    return given


def formula(form: Form, inputs: Inputs) -> np.ndarray:
    """Compute the formula of the paper in float64."""
    compute = MECHANISMS[form.operator.stem]
    return compute(inputs, causal=form.causal, **form.all_attributes())


def as_tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x) for name, x in inputs.items()}


def run_torch(form: Form, inputs: Inputs) -> np.ndarray:
    """Run the torch op."""
    with torch.no_grad():
        return form.operator.torch_op(**as_tensors(inputs), **form.all_attributes()).numpy()


def run_reference(form: Form, inputs: Inputs) -> np.ndarray:
    """Run the package's definition in float64."""
    tensors = as_tensors(inputs)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    return form.operator.reference(**wide, **form.all_attributes()).numpy()


def one_node(form: Form, dtype: str = "float32") -> OneNode:
    present = ("key_lengths",) if form.keys is not None else ()
    names = [*form.operator.required_inputs, *present]
    return OneNode.of(form.op_type, form.all_attributes(), names, dtype)


def error(found: np.ndarray, expected: np.ndarray, lengths: np.ndarray) -> float:
    """Return the largest error of counted rows, relative to the largest number or 1."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    counted = np.arange(found.shape[1]) < lengths[:, None]
    if not counted.any():
        return 0.0
    difference = np.abs(found.astype(np.float64) - expected)[counted].max()
    return float(difference / max(1.0, np.abs(expected[counted]).max()))
