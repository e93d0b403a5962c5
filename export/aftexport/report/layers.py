"""What a comparison layer by layer found. Needs no torch, as what shows it does not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Blame:
    """Where an error comes from.

    Attributes:
        tensor: the first to leave tolerance, or one before it whose operator errs more by itself.
        modules: paths of the PyTorch modules that its operator computes, in order.
        operator: of the node that gives it.
        path: ``fused kernel``, ``portable body`` or ``standard operator``.
        cause: ``kernel``, ``precision`` or ``export``.
        error: of the operator alone, against PyTorch in float64 on the same inputs.
        steps: what each form of the operator differs by from the next.
        findings: sentences that say more.
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
        """Where and why, in a sentence."""
        inner = [m for m in self.modules if not any(o.startswith(f"{m}.") for o in self.modules)]
        return (
            f"{self.operator} ({self.path}) in {', '.join(inner)}: {_WHY[self.cause]}; "
            f"alone it is off by {self.error:.1e}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            **vars(self),
            "modules": list(self.modules),
            "error": _plain(self.error),
            "steps": {name: _plain(step) for name, step in self.steps.items()},
            "findings": list(self.findings),
        }


_WHY = {
    "kernel": "the fused kernel differs from the operator's portable body",
    "precision": "the numbers it computes in are too narrow",
    "export": "what was exported is not what PyTorch computes",
}


@dataclass(frozen=True)
class Layer:
    """One tensor of the graph that is served, beside PyTorch's.

    Attributes:
        tensor: its name in the graph.
        module: the path of the PyTorch module that computes it.
        operator: of the node that gives it.
        path: ``fused kernel``, ``portable body`` or ``standard operator``.
        error: as ``Differences.error``.
        outside: whether that is more than the tolerance.
    """

    tensor: str
    module: str
    operator: str
    path: str
    error: float
    outside: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**vars(self), "error": _plain(self.error)}


@dataclass(frozen=True)
class Layers:
    """What a comparison layer by layer found.

    Attributes:
        case: what it was run on.
        bound: the tolerance.
        layers: in the order of the graph.
        altered: tensors that could only be seen in a graph that ONNX Runtime fuses otherwise
            than the one that is served.
        unmatched: tensors of the graph that PyTorch's program lacks.
        blame: whose fault it is; None where everything is within tolerance.
    """

    case: str
    bound: float
    layers: Sequence[Layer]
    altered: Sequence[str]
    unmatched: Sequence[str]
    blame: Blame | None

    @property
    def first(self) -> Layer | None:
        """The first layer that leaves tolerance."""
        return next((layer for layer in self.layers if layer.outside), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
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
