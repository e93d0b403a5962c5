"""A case to compare on, and how cases lie in a bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


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
