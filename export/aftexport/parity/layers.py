"""The result of a comparison layer by layer. It needs no torch, so that reports need none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Blame:
    """The origin of an error."""

    # first tensor out of tolerance, or an earlier one whose operator has a larger own error
    tensor: str
    modules: Sequence[str]  # paths of the PyTorch modules that the operator computes, in order
    operator: str
    path: str  # `fused kernel`, `portable body` or `standard operator`
    cause: str  # `kernel`, `precision` or `export`
    error: float  # operator's own error against PyTorch in float64 on the same inputs
    steps: Mapping[str, float]  # difference between each form of the operator and the next
    findings: Sequence[str]  # sentences with further details

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
    """The comparison of one tensor of the served graph with PyTorch."""

    tensor: str
    module: str  # path of the PyTorch module that computes the tensor
    operator: str
    path: str  # `fused kernel`, `portable body` or `standard operator`
    error: float
    outside: bool

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {**vars(self), "error": _plain(self.error)}


@dataclass(frozen=True)
class Layers:
    """The result of a comparison layer by layer."""

    case: str
    bound: float
    layers: Sequence[Layer]  # tensors in the order of the graph
    # tensors whose observation changes how ONNX Runtime fuses the served graph
    altered: Sequence[str]
    unmatched: Sequence[str]  # tensors of the graph that PyTorch's program lacks
    blame: Blame | None  # origin of the error; None if everything is within tolerance

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
