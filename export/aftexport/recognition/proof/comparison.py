"""Comparison of two evaluators on adversarial inputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from aftexport.recognition.graph.shape_probe import ProbedGraph
from aftexport.recognition.proof.evaluator import run_once
from aftexport.recognition.proof.inputs import input_cases
from aftexport.recognition.proof.part import ProofError

RELATIVE_TOLERANCE = 1e-9
"""The tolerance relative to the number itself, as float64 rounds."""
SLICE_TOLERANCE = 1e-10
"""The tolerance relative to the largest number in its slice, for sums that cancel."""


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        excess: the largest ratio of a difference to the tolerance.
        case: the case with that ratio.
        cases: the number of cases.
    """

    excess: float
    case: str
    cases: int

    @property
    def holds(self) -> bool:
        """Whether the rewrite is equal in every case."""
        return self.excess <= 1.0


def compare(
    before: ReferenceEvaluator,
    after: ReferenceEvaluator,
    inputs: Iterable[ir.Value],
    probed: ProbedGraph,
    lowest: Mapping[ir.Value, float],
) -> Verdict:
    """Run original and rewrite on every case, and stop at the first difference.

    Args:
        before: the evaluator of the original.
        after: the evaluator of the rewrite.
        inputs: the inputs of both.
        probed: the probed values, with the shapes of the inputs.
        lowest: the lowest values of inputs at which the original keeps its digits.

    Raises:
        ProofError: if one does not run, or the original gives no finite numbers.
    """
    inputs = list(inputs)
    count = 0
    compared = False
    largest, where = 0.0, ""
    # One run of several with the same shapes is enough.
    runs = {tuple(a.shape for a in run.values()): run for run in (*probed.runs, *probed.edge_runs)}
    for run in runs.values():
        for case, feeds in input_cases(inputs, run, probed):
            for value, floor in lowest.items():
                if str(value.name) in feeds:
                    feeds[str(value.name)] = np.maximum(feeds[str(value.name)], floor)
            count += 1
            try:
                expected, got = run_once(before, feeds), run_once(after, feeds)
            except Exception as error:  # the evaluator of onnx, on any graph
                raise ProofError(f"it cannot be run in float64 ({error})") from error
            if expected.shape != got.shape:
                return Verdict(np.inf, f"{case}, shape {got.shape}", count)
            finite = np.isfinite(expected)
            compared |= bool(finite.mean() > 0.5) if finite.size else False
            excess = _excess(expected, got, finite)
            if excess >= largest:
                largest, where = excess, case
            if excess > 1.0:
                return Verdict(excess, case, count)
    if not compared:
        raise ProofError("it gives no finite numbers to compare with")
    return Verdict(largest, where, count)


def _excess(
    expected: NDArray[np.float64], got: NDArray[np.float64], finite: NDArray[np.bool_]
) -> float:
    size = np.where(finite, np.abs(expected), 0.0)
    scale = np.full(size.shape, np.inf)
    for axis in range(size.ndim):
        others = tuple(a for a in range(size.ndim) if a != axis)
        scale = np.minimum(scale, size.max(axis=others, keepdims=True, initial=0.0))
    allowed = RELATIVE_TOLERANCE * size + SLICE_TOLERANCE * np.where(np.isfinite(scale), scale, 0.0)
    with np.errstate(all="ignore"):
        difference = np.where(finite, np.abs(expected - got), 0.0)
        ratio = np.where(difference == 0.0, 0.0, difference / allowed)
    return float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf).max(initial=0.0))
