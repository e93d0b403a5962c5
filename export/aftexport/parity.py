"""Is what is served still what was trained? The bounds, the comparison, the golden cases.

Needs no torch: the golden cases carry PyTorch's outputs, so that any machine can
judge any engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Tolerance:
    """The largest error that is still equality, and why.

    ``bound`` is on ``max |output - reference| / max(1, max |reference|)``.
    """

    bound: float
    reason: str


TOLERANCES = {
    "fp32": Tolerance(
        1e-4,
        "float32 rounds a logit of magnitude 1000 by 3e-5, and the exponential turns that "
        "into a relative error; sums over tokens and layers add less",
    ),
    "fp16": Tolerance(
        2e-2,
        "float16 weights and activations carry 11 bits, 5e-4 each; a few layers of them, "
        "with every sum over tokens in float32, stay within forty such steps",
    ),
    "bf16": Tolerance(
        2e-2,
        "bfloat16 operands carry 8 bits, 4e-3 each; a product of them has errors of "
        "either sign, which a float32 sum evens out",
    ),
    "int8": Tolerance(
        5e-2,
        "int8 steps are 1/127 of a column's or a row's largest value, 8e-3; their errors "
        "even out in a sum and add up over the layers",
    ),
}
"""The one table of error bounds, by precision; every test and report reads it."""


@dataclass(frozen=True)
class Case:
    """Inputs with the outputs PyTorch gives for them.

    Attributes:
        name: what is special about it.
        subject: ``model``, or the operator it is run through alone.
        inputs: tensors by name.
        expected: PyTorch's output; several of an operator side by side along the last axis.
    """

    name: str
    subject: str
    inputs: Mapping[str, Array]
    expected: Array


@dataclass(frozen=True)
class Comparison:
    """How far one output is from the reference.

    Attributes:
        case, subject: of the ``Case``.
        shape: of ``input_ids``, or of an operator's output.
        error: ``max |output - reference| / max(1, max |reference|)``; infinite
            where the output is not finite or has another shape.
        bound: the tolerance it is judged by.
        label_flips: rows whose largest entry is another one.
    """

    case: str
    subject: str
    shape: tuple[int, ...]
    error: float
    bound: float
    label_flips: int

    @property
    def passed(self) -> bool:
        """Whether the output is within the bound."""
        return self.error <= self.bound

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; an infinite error is the text ``inf``."""
        error = self.error if np.isfinite(self.error) else "inf"
        return asdict(self) | {"shape": list(self.shape), "error": error, "passed": self.passed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Reads what ``to_dict`` wrote."""
        known = {k: v for k, v in values.items() if k != "passed"}
        return cls(**known | {"shape": tuple(values["shape"]), "error": float(values["error"])})


def compare(case: Case, output: Array, precision: str) -> Comparison:
    """Measures ``output`` against the case's reference, over the rows that count."""
    bound = TOLERANCES[precision].bound
    shape = (case.inputs["input_ids"] if case.subject == "model" else case.expected).shape
    actual = np.asarray(output, dtype=np.float64)
    expected = np.asarray(case.expected, dtype=np.float64)
    error, flips = float("inf"), 0
    comparable = actual.shape == expected.shape and actual.size > 0
    if comparable and np.isfinite(actual).all() and np.isfinite(expected).all():
        difference = np.abs(actual - expected)
        if case.subject == "model":
            flips = int((actual.argmax(-1) != expected.argmax(-1)).sum())
        elif "lengths" in case.inputs:
            # Rows of padding are whatever the kernel finds convenient.
            lengths = np.asarray(case.inputs["lengths"], np.int64)
            rows = np.arange(expected.shape[1]) < lengths[:, None]
            difference, expected = difference[rows], expected[rows]
        scale = max(1.0, float(np.abs(expected).max(initial=0)))
        error = float(difference.max(initial=0)) / scale
    return Comparison(case.name, case.subject, shape, error, bound, flips)


def pack_cases(cases: Sequence[Case]) -> dict[str, Array]:
    """Flattens cases to tensors by name, for one safetensors file."""
    tensors: dict[str, Array] = {}
    for case in cases:
        prefix = f"{case.subject}/{case.name}"
        tensors |= {f"{prefix}/input/{name}": tensor for name, tensor in case.inputs.items()}
        tensors[f"{prefix}/expected"] = case.expected
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def unpack_cases(tensors: Mapping[str, Array]) -> list[Case]:
    """Reads what ``pack_cases`` wrote, the model's cases first.

    Raises:
        ValueError: where a case lacks its inputs or its expected output.
    """
    found: dict[tuple[str, str], dict[str, Array]] = {}
    for key, tensor in sorted(tensors.items()):
        subject, name, rest = key.split("/", 2)
        found.setdefault((subject, name), {})[rest] = tensor
    cases = []
    for (subject, name), parts in found.items():
        inputs = {k.removeprefix("input/"): v for k, v in parts.items() if k.startswith("input/")}
        if "expected" not in parts or not inputs:
            raise ValueError(f"the golden case {subject}/{name} is incomplete")
        cases.append(Case(name, subject, inputs, parts["expected"]))
    return sorted(cases, key=lambda case: (case.subject != "model", case.subject, case.name))
