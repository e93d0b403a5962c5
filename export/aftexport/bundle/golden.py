"""A case for comparisons, the form of cases in a bundle, and random tokens for cases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.operators.schema import STATE_OUTPUT
from aftexport.system.contract import main_input

Array = NDArray[np.generic]
IN_WINDOWS = "model in windows"
"""The subject of a case with the outputs for each window of a document."""
OPERATOR_OUTPUT = "output"
"""The name of the output of an operator's case, with all outputs of the operator."""


@dataclass(frozen=True)
class Case:
    """Inputs with PyTorch's outputs for them."""

    name: str
    subject: str  # `model`, `IN_WINDOWS`, or the name of the only operator that is run
    inputs: Mapping[str, Array]
    # PyTorch's outputs by name. An operator has one, `OPERATOR_OUTPUT`: all its outputs, joined by
    # `join_outputs`
    outputs: Mapping[str, Array]

    @property
    def is_of_operator(self) -> bool:
        """Whether a single operator is run, rather than the model."""
        return not self.subject.startswith("model")

    @property
    def shape(self) -> tuple[int, ...]:
        """``[batch, tokens]`` of the model's case; for an operator, the shape of its output."""
        if self.is_of_operator:
            return tuple(self.outputs[OPERATOR_OUTPUT].shape)
        return tuple(self.inputs[main_input(self.inputs)].shape[:2])


def join_outputs(outputs: Mapping[str, Array]) -> Array:
    """Return the outputs of an operator as one array, joined along the last axis.

    A state has no row for each token. All its numbers are repeated in every row, so that a mask of
    the rows of padding leaves them in.
    """
    first, *_ = outputs.values()
    parts = [
        np.broadcast_to(part.reshape(len(part), 1, -1), (*first.shape[:2], part[0].size))
        if name == STATE_OUTPUT
        else part
        for name, part in outputs.items()
    ]
    return np.concatenate(parts, axis=-1)


def pack_cases(cases: Sequence[Case]) -> dict[str, Array]:
    """Return the tensors of cases by name, for one safetensors file."""
    tensors: dict[str, Array] = {}
    for case in cases:
        prefix = f"{case.subject}/{case.name}"
        tensors |= {f"{prefix}/input/{name}": tensor for name, tensor in case.inputs.items()}
        tensors |= {f"{prefix}/output/{name}": tensor for name, tensor in case.outputs.items()}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def unpack_cases(tensors: Mapping[str, Array]) -> list[Case]:
    """Return the cases in tensors, the model's first; raise ValueError if one lacks a part."""
    grouped: dict[tuple[str, str], dict[str, Array]] = {}
    for key, tensor in sorted(tensors.items()):
        subject, name, rest = key.split("/", 2)
        grouped.setdefault((subject, name), {})[rest] = tensor
    cases = []
    for (subject, name), parts in grouped.items():
        inputs, outputs = (_named(parts, kind) for kind in ("input/", "output/"))
        case = Case(name, subject, inputs, outputs)
        if not outputs or not inputs or (case.is_of_operator and OPERATOR_OUTPUT not in outputs):
            raise ValueError(f"the golden case {subject}/{name} is incomplete")
        cases.append(case)
    return sorted(cases, key=lambda case: (case.subject != "model", case.subject, case.name))


def _named(parts: Mapping[str, Array], kind: str) -> dict[str, Array]:
    return {key.removeprefix(kind): part for key, part in parts.items() if key.startswith(kind)}


def random_tokens(
    generator: np.random.Generator,
    sizes: tuple[int, ...],
    *,
    vocab_size: int | None,  # number of ids; None for a model of features
    num_features: int | None,  # number of features of each token; None for a model of ids
) -> Array:
    """Return ids ``[*sizes]``, or standard normal features ``[*sizes, num_features]``."""
    if num_features is not None:
        return generator.standard_normal((*sizes, num_features), np.float32)
    assert vocab_size is not None  # a model has ids or features
    return generator.integers(0, vocab_size, sizes, np.int64)
