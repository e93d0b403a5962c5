"""The steps between the runs of one operator, and the cause that they name."""

from dataclasses import dataclass

_FAR = 10
"""Maximum difference of a correct kernel from the body, in multiples of the body's rounding."""


@dataclass(frozen=True)
class Steps:
    """Errors between runs of one operator that differ in one thing each.

    Attributes:
        served_again: the tensor as it was observed, and the same run once more.
        kernel: the fused kernel in float32, and the portable body.
        kernel_precision: the fused kernel as served, and in float32.
        body_precision: the portable body in the types of the graph, and in float64.
        body: the body in float64, and the operator's definition.
        definition: the definition, and PyTorch with the weights of the graph.
        weight_precision: PyTorch with the weights of the graph, and with those that were trained.
        torch_in_same_types: PyTorch in the types of the graph, and in float64; infinite if
            PyTorch lacks an operator for them.
    """

    served_again: float
    kernel: float
    kernel_precision: float
    body_precision: float
    body: float
    definition: float
    weight_precision: float
    torch_in_same_types: float

    def to_dict(self) -> dict[str, float]:
        """Return the steps under the names that reports show."""
        return {
            "served again": self.served_again,
            "kernel": self.kernel,
            "precision of the kernel": self.kernel_precision,
            "precision of the body": self.body_precision,
            "body": self.body,
            "definition": self.definition,
            "precision of the weights": self.weight_precision,
            "PyTorch in the same types": self.torch_in_same_types,
        }


@dataclass(frozen=True)
class Verdict:
    """The cause of an error.

    Attributes:
        cause: ``export``, ``precision`` or ``kernel``.
        loses_digits: whether the formula in the file loses digits that its types would keep.
    """

    cause: str
    loses_digits: bool


def judge(steps: Steps, bound: float, *, fused: bool) -> Verdict:
    """Name the cause of an error: the one with the largest step.

    Args:
        steps: the steps that were measured.
        bound: the tolerance.
        fused: whether a fused kernel served the operator.
    """
    kernel = max(steps.kernel, steps.served_again)
    # Two correct kernels differ by their rounding. If numbers overflow, they may lose
    # different ones.
    rounding = max(steps.body_precision, steps.weight_precision)
    broken = fused and kernel > max(bound, _FAR * rounding)
    formula = _lost_by_formula(steps, bound)
    if formula:
        rounding = steps.weight_precision
    shares = {
        "export": max(steps.definition, 0.0 if fused else steps.body, formula),
        "precision": max(steps.kernel_precision, rounding, 0.0 if broken else kernel),
        "kernel": kernel if broken else 0.0,
    }
    cause = max(shares, key=lambda name: shares[name])
    return Verdict(cause, loses_digits=cause == "export" and formula == shares["export"])


def _lost_by_formula(steps: Steps, bound: float) -> float:
    """Return the error of the body if its types do not explain the error, else 0."""
    lost, own = steps.body_precision, steps.torch_in_same_types
    return lost if own <= min(bound, lost / _FAR) else 0.0
