"""Test cases of the operators: every setting, a table of shapes, hard values."""

import zlib
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import torch
from one_node import OneNode

from aftexport.operators.schema import Attribute
from aftexport.operators.torch_ops import OPERATORS, Operator
from aftexport.parity import TOLERANCES

Inputs = dict[str, np.ndarray]

BOUND = {
    "float64": 1e-9,
    "float32": TOLERANCES["fp32"].bound,
    "float16": TOLERANCES["fp16"].bound,
}
"""Largest error allowed, as ``error`` measures it."""

ATTRIBUTES = {"scale": 0.5, "eps": 1e-3}
"""Values other than the defaults, so that an unread attribute changes the result."""


@dataclass(frozen=True)
class Variant:
    """An operator with one choice of its settings."""

    op_type: str
    settings: tuple[tuple[str, str], ...]

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.op_type]

    @property
    def causal(self) -> bool:
        return self.op_type.startswith("Causal")

    def __str__(self) -> str:
        return "-".join([self.operator.stem, self.op_type, *(v for _, v in self.settings)])

    def attributes(self, num_heads: int) -> dict[str, int | float | str]:
        """Return the attributes by name, in the order of the torch op's arguments."""
        chosen = {"num_heads": num_heads, **ATTRIBUTES}
        given = {a.name: chosen[a.name] for a in self.operator.attributes if _is_first(a)}
        defaults = {a.name: a.default for a in self.operator.attributes}
        return defaults | given | dict(self.settings)


def _is_first(attribute: Attribute) -> bool:
    """Return whether an attribute is a number that the GPU kernels take too."""
    return not attribute.is_cpu_only and not attribute.choices


def _variants() -> list[Variant]:
    variants = [
        Variant(op_type, tuple(zip((a.name for a in operator.settings), chosen, strict=True)))
        for op_type, operator in OPERATORS.items()
        for chosen in product(*(a.choices for a in operator.settings))
    ]
    return [v for v in variants if WIDE_SETTINGS.isdisjoint(v.settings)]


WIDE_SETTINGS = {("feature_map", "identity"), ("normalizer", "clamp"), ("normalizer", "none")}
"""Choices that ``wide_forms`` tests; random numbers as features may cancel in a divisor."""

VARIANTS = _variants()
"""Every operator with every choice of its settings but ``WIDE_SETTINGS``."""

ONE_GATE = [v for v in VARIANTS if dict(v.settings).get("gate", "sigmoid") == "sigmoid"]
"""Every body that is more than another gate."""

CAUSAL = [v for v in ONE_GATE if v.causal]


@dataclass(frozen=True)
class Case:
    """A shape and a range of values.

    Attributes:
        window: s of the band, taps of the filter.
        spare: rows of the learned bias beyond T; ``relative`` is a band of one row.
        spread: largest magnitude of queries, keys and biases.
        arrangement: of keys and biases, see ``make_inputs``.
    """

    name: str
    tokens: int
    lengths: tuple[int, ...]
    channels: int = 8
    heads: int = 2
    window: int = 4
    spare: int = 3
    relative: bool = False
    spread: float = 1.0
    arrangement: str = "random"

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


def make_inputs(operator: Operator, case: Case, dtype: str = "float32") -> Inputs:
    """Draw inputs that ``dtype`` holds exactly, the same ones for the same case.

    Arrangements: ``dominating key``, one key of +100 that every bias holds down by
    100; ``opposed``, biases that undo the keys, so that the maxima of the two are
    never in one place; ``late large key``, keys and biases of 0 and a last key of 120.
    """
    rng = np.random.default_rng(zlib.crc32(f"{operator.stem} {case}".encode()))
    batch, tokens, channels, heads = len(case.lengths), case.tokens, case.channels, case.heads
    causal = operator.op_type.startswith("Causal")

    def uniform(*shape: int) -> np.ndarray:
        return rng.uniform(-case.spread, case.spread, shape)

    def logit_weight() -> np.ndarray:
        return rng.normal(size=(channels, heads)) / np.sqrt(heads)

    width = case.window if causal else 2 * case.window - 1
    draws = {
        "query": lambda: uniform(batch, tokens, channels),
        "key": lambda: uniform(batch, tokens, heads if operator.stem == "aft_conv" else channels),
        "value": lambda: rng.normal(size=(batch, tokens, channels)),
        "position_bias": lambda: uniform(tokens + case.spare, tokens + case.spare),
        "band": lambda: uniform(1 if case.relative else tokens + case.spare, width),
        "filter": lambda: uniform(heads, case.window),
        # The second logits are of products of three inputs; keep them of the order of the first.
        "alpha_weight": logit_weight,
        "beta_weight": lambda: logit_weight() / case.spread,
    }
    inputs = {name: draws[name]() for name in operator.required_inputs[:-1]}
    _arrange(case, inputs, operator.stem)
    inputs = {name: x.astype(dtype) for name, x in inputs.items()}
    return {**inputs, "lengths": np.array(case.lengths, dtype=np.int64)}


def _arrange(case: Case, inputs: Inputs, stem: str) -> None:
    key, tokens = inputs["key"], case.tokens
    biases = [inputs[n] for n in ("position_bias", "band", "filter") if n in inputs]
    if case.arrangement == "dominating key":
        key[:, tokens // 2] = 100
        for bias in biases:
            bias[:, tokens // 2 if stem == "aft_full" else slice(None)] = -100
    elif case.arrangement == "opposed":
        ramp = np.linspace(-100, 100, tokens)
        key[:] = ramp[:, None]
        for bias in biases:
            if stem == "aft_full":
                bias[:, :tokens] = -ramp
            elif stem == "aft_conv":
                bias[:] = np.linspace(100, -100, case.window)
            else:
                keys = np.add.outer(np.arange(len(bias)), np.arange(bias.shape[1]))
                bias[:] = -ramp[np.clip(keys - (case.window - 1), 0, tokens - 1)]
    elif case.arrangement == "late large key":
        if stem == "fastformer":  # its logits are of the queries
            inputs["query"][:, -1] *= 120
            return
        key[:] = 0
        key[:, -1] = 120
        for bias in biases:
            bias[:] = 0


SHAPES = [
    Case("1 token", 1, (1, 0, 1)),
    Case("2 tokens", 2, (2, 1, 0)),
    Case("7 tokens", 7, (7, 3, 0)),
    *(Case(f"{t} tokens", t, (t, t // 2 + 1, 1)) for t in (31, 32, 33, 63, 64, 65, 127)),
    Case("500 tokens", 500, (500, 389), channels=4),
    Case("one document", 33, (33,)),
    Case("one head", 33, (33, 20), heads=1),
    Case("four heads", 33, (33, 20), heads=4),
    Case("heads of one channel", 9, (9, 4), channels=3, heads=3),
    Case("window of one", 33, (33, 20), window=1),
    Case("even window", 33, (33, 20), window=6),
    Case("odd window", 33, (33, 20), window=5),
    Case("window beyond the tokens", 7, (7, 3), window=12),
    Case("window of a whole block", 130, (130, 97), channels=4, window=33),
    Case("bias of just the tokens", 33, (33, 20), spare=0),
    Case("relative bias", 70, (70, 1), relative=True),
    Case("lengths out of range", 9, (99, 9, -5)),
]
VALUES = [
    Case("range 10", 65, (65, 33), spread=10),
    Case("range 100", 65, (65, 33), spread=100),
    Case("range 100 of 7 tokens", 7, (7, 2), spread=100),
    Case("dominating key", 65, (65, 40), arrangement="dominating key"),
    Case("dominating key of 5 tokens", 5, (5, 4), arrangement="dominating key"),
    Case("opposed keys and biases", 65, (65, 40), arrangement="opposed"),
    Case("opposed keys and biases in a wide window", 9, (9,), window=9, arrangement="opposed"),
    Case("late large key", 65, (65, 65), arrangement="late large key"),
    Case("late large key of 4 tokens", 4, (4,), arrangement="late large key"),
]
CASES = SHAPES + VALUES
BY_NAME = {case.name: case for case in CASES}
FEW = [BY_NAME[n] for n in ("1 token", "7 tokens", "65 tokens", "range 100", "late large key")]
"""For what differs little from something tried on all cases."""

PAIRS = list(product(ONE_GATE, CASES)) + [
    (v, c) for v, c in product(VARIANTS, FEW) if v not in ONE_GATE
]


def variant_of(op_type: str, **settings: str) -> Variant:
    """Return the operator, with default settings where none are given."""
    operator = OPERATORS[op_type]
    return Variant(
        op_type, tuple((a.name, settings.get(a.name, a.default)) for a in operator.settings)
    )


def by_hand(lengths: tuple[int, ...], **tensors: list) -> Inputs:
    """Return inputs in the operator's order; with one axis they are one channel's tokens."""
    inputs = {n: np.array(x, dtype=np.float32) for n, x in tensors.items()}
    for name in ("query", "key", "value"):
        if inputs[name].ndim == 1:
            inputs[name] = inputs[name][None, :, None]
    return {**inputs, "lengths": np.array(lengths, dtype=np.int64)}


def named(pairs: list[tuple[Variant, Case]]) -> dict[str, object]:
    """Return arguments of ``pytest.mark.parametrize`` for pairs of a variant and a case."""
    return {
        "argnames": ("variant", "case"),
        "argvalues": pairs,
        "ids": [f"{variant}-{case}" for variant, case in pairs],
    }


def as_tensors(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(x.copy()) for x in inputs.values())


def run_torch(variant: Variant, inputs: Inputs, num_heads: int = 2) -> np.ndarray:
    """Run the torch op."""
    attributes = variant.attributes(num_heads).values()
    with torch.no_grad():
        return variant.operator.torch_op(*as_tensors(inputs), *attributes).numpy()


def run_reference(variant: Variant, inputs: Inputs, num_heads: int = 2) -> np.ndarray:
    """Run the package's definition in float64."""
    *floats, lengths = as_tensors(inputs)
    with torch.no_grad():
        return variant.operator.reference(
            *(x.double() for x in floats), lengths, **variant.attributes(num_heads)
        ).numpy()


@cache
def truth(variant: Variant, case: Case, dtype: str = "float32") -> np.ndarray:
    """Return the reference's result for the inputs of a case."""
    return run_reference(variant, make_inputs(variant.operator, case, dtype), case.heads)


def error(result: np.ndarray, expected: np.ndarray, inputs: Inputs) -> float:
    """``max|y - ref| / max(1, max|ref|)`` over the rows within each document's length.

    The rows beyond may hold anything finite.
    """
    assert result.shape == inputs["query"].shape
    assert np.isfinite(result).all()
    valid = np.arange(result.shape[1]) < inputs["lengths"][:, None]
    expected = np.broadcast_to(expected, result.shape)
    if not valid.any():
        return 0.0
    difference = result.astype(np.float64)[valid] - expected[valid]
    return float(np.abs(difference).max() / max(1.0, np.abs(expected[valid]).max()))


def with_tokens(inputs: Inputs, tokens: slice) -> Inputs:
    """Return the same documents, cut to some of their tokens."""
    return {n: x[:, tokens] if x.ndim == 3 else x for n, x in inputs.items()}


def one_node(
    variant: Variant, num_heads: int = 2, opset: int = 20, dtype: str = "float32"
) -> OneNode:
    operator, attributes = variant.operator, variant.attributes(num_heads)
    return OneNode.of(variant.op_type, attributes, operator.required_inputs, dtype, opset)


def run_portable(
    variant: Variant, inputs: Inputs, num_heads: int = 2, opset: int = 20
) -> np.ndarray:
    """Run the portable body in ONNX Runtime."""
    return one_node(variant, num_heads, opset, str(inputs["query"].dtype)).run(inputs)[0]


def run_kernel(variant: Variant, inputs: Inputs) -> np.ndarray:
    """Run the kernel for the CPU."""
    return one_node(variant, dtype=str(inputs["query"].dtype)).run(inputs, kernel=True)[0]
