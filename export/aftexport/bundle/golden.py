"""A case for comparisons, and the form of cases in a bundle."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.contract import main_input

Array = NDArray[np.generic]


@dataclass(frozen=True)
class Case:
    """Inputs with PyTorch's outputs for them.

    Attributes:
        name: a description of the case.
        subject: ``model``, or the name of the only operator that is run.
        inputs: tensors by name.
        expected: PyTorch's output; several outputs of an operator are joined along the last axis.
    """

    name: str
    subject: str
    inputs: Mapping[str, Array]
    expected: Array

    @property
    def shape(self) -> tuple[int, int]:
        """The number of documents, and of tokens of the longest one, of a case of the model."""
        batch, tokens = self.inputs[main_input(self.inputs)].shape[:2]
        return batch, tokens


def pack_cases(cases: Sequence[Case]) -> dict[str, Array]:
    """Return the tensors of cases by name, for one safetensors file."""
    tensors: dict[str, Array] = {}
    for case in cases:
        prefix = f"{case.subject}/{case.name}"
        tensors |= {f"{prefix}/input/{name}": tensor for name, tensor in case.inputs.items()}
        tensors[f"{prefix}/expected"] = case.expected
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def unpack_cases(tensors: Mapping[str, Array]) -> list[Case]:
    """Return the cases in the tensors of ``pack_cases``, the model's cases first.

    Raises:
        ValueError: if a case lacks its inputs or its expected output.
    """
    grouped: dict[tuple[str, str], dict[str, Array]] = {}
    for key, tensor in sorted(tensors.items()):
        subject, name, rest = key.split("/", 2)
        grouped.setdefault((subject, name), {})[rest] = tensor
    cases = []
    for (subject, name), parts in grouped.items():
        inputs = {k.removeprefix("input/"): v for k, v in parts.items() if k.startswith("input/")}
        if "expected" not in parts or not inputs:
            raise ValueError(f"the golden case {subject}/{name} is incomplete")
        cases.append(Case(name, subject, inputs, parts["expected"]))
    return sorted(cases, key=lambda case: (case.subject != "model", case.subject, case.name))
