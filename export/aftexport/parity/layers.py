"""The result of a comparison layer by layer. It needs no torch, so that reports need none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Blame:
    """The origin of an error.

    Attributes:
        tensor: the first tensor out of tolerance, or an earlier tensor whose operator has a
            larger error of its own.
        modules: paths of the PyTorch modules that the operator computes, in order.
        operator: type of the operator that computes the tensor.
        path: ``fused kernel``, ``portable body`` or ``standard operator``.
        cause: ``kernel``, ``precision`` or ``export``.
        error: the operator's own error against PyTorch in float64 on the same inputs.
        steps: difference between each form of the operator and the next.
        findings: sentences with further details.
    """

    tensor: str
    modules: Sequence[str]
    operator: str
    path: str
    cause: str
    error: float
    steps: Mapping[str, float]
    findings: Sequence[str]

    @property
    def sentence(self) -> str:
        """The place and the cause of the error, in a sentence."""
        inner = [m for m in self.modules if not any(o.startswith(f"{m}.") for o in self.modules)]
        return (
            f"{self.operator} ({self.path}) in {', '.join(inner)}: {_WHY[self.cause]}; "
            f"its own error is {self.error:.1e}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            **vars(self),
            "modules": list(self.modules),
            "error": _plain(self.error),
            "steps": {name: _plain(step) for name, step in self.steps.items()},
            "findings": list(self.findings),
        }


_WHY = {
    "kernel": "the fused kernel differs from the operator's portable body",
    "precision": "its number type has too few digits",
    "export": "the exported formula or weights differ from PyTorch's",
}


@dataclass(frozen=True)
class Layer:
    """The comparison of one tensor of the served graph with PyTorch.

    Attributes:
        tensor: name of the tensor in the graph.
        module: path of the PyTorch module that computes the tensor.
        operator: type of the operator that computes the tensor.
        path: ``fused kernel``, ``portable body`` or ``standard operator``.
        error: the error, as in ``Differences.error``.
        outside: whether the error exceeds the tolerance.
    """

    tensor: str
    module: str
    operator: str
    path: str
    error: float
    outside: bool

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {**vars(self), "error": _plain(self.error)}


@dataclass(frozen=True)
class Layers:
    """The result of a comparison layer by layer.

    Attributes:
        case: name of the case.
        bound: the tolerance.
        layers: the tensors in the order of the graph.
        altered: tensors whose observation changes how ONNX Runtime fuses the served graph.
        unmatched: tensors of the graph that PyTorch's program lacks.
        blame: origin of the error; None if everything is within tolerance.
    """

    case: str
    bound: float
    layers: Sequence[Layer]
    altered: Sequence[str]
    unmatched: Sequence[str]
    blame: Blame | None

    @property
    def first(self) -> Layer | None:
        """The first layer out of tolerance."""
        return next((layer for layer in self.layers if layer.outside), None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "case": self.case,
            "bound": self.bound,
            "layers": [layer.to_dict() for layer in self.layers],
            "first": self.first.tensor if self.first else None,
            "altered": list(self.altered),
            "unmatched": list(self.unmatched),
            "blame": self.blame.to_dict() if self.blame else None,
        }


def _plain(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)
