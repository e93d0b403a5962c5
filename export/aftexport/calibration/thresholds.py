"""The smallest confidence that keeps the error rate of answered documents within a budget.

The method is fixed-sequence testing as in "Learn then test: Calibrating predictive algorithms to
achieve risk control" (Angelopoulos, Bates, Candès, Jordan and Lei, 2021). One part of the
documents fits the scaling and orders the thresholds. The other part tests them in this order until
one fails. Because scaling and order do not depend on the tested documents, every test keeps its
level, and no correction for the choice among thresholds is needed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from aftexport.calibration.requirements import LEVEL, documents_without_error
from aftexport.heads.calibration import Threshold
from aftexport.heads.head import Double

CANDIDATES = 200
"""The number of thresholds, which answer equally many more of the fitted documents each."""


@dataclass(frozen=True)
class NoThreshold:
    """The reason why no threshold keeps the budget.

    Attributes:
        answered, wrong: the numbers of answered and wrong documents of the first test.
        error_bound: the upper bound on their error rate.
    """

    answered: int
    wrong: int
    error_bound: float


def upper_bound(wrong: int, answered: int) -> float:
    """Return the upper bound of Clopper and Pearson (1934) on an error rate."""
    if wrong >= answered:
        return 1.0
    return float(betaincinv(wrong + 1, answered - wrong, LEVEL))


def ordered_thresholds(confidence: Double, budget: float, tested: int) -> Double:
    """Return thresholds in the order of their tests, from the documents of the fit only.

    The first threshold is the one most likely to pass, by the mean confidence of the documents
    that it answers. The next ones answer more documents each.

    Args:
        confidence: the calibrated confidence of the documents of the fit.
        budget: the allowed error rate.
        tested: the number of documents of the test.
    """
    ordered = np.sort(confidence)[::-1]
    ends = np.unique(np.linspace(1, len(ordered), CANDIDATES).round().astype(np.int64))
    candidates = ordered[ends - 1]
    answered = ends / len(ordered) * tested
    expected = answered * np.cumsum(1 - ordered)[ends - 1] / ends
    bounds = betaincinv(expected + 1, np.maximum(answered - expected, 1e-9), LEVEL)
    enough = answered >= documents_without_error(budget)
    start = int(np.where(enough, bounds, np.inf).argmin()) if enough.any() else len(ends) - 1
    return np.unique(candidates[start:])[::-1]


def choose_threshold(
    fitted: Double, confidence: Double, wrong: NDArray[np.bool_], budget: float
) -> Threshold | NoThreshold:
    """Return the smallest threshold before the first that fails its test.

    Args:
        fitted: the confidence of the documents of the fit.
        confidence: the confidence of the other documents, by the same scaling.
        wrong: whether the answers for these are wrong.
        budget: the allowed error rate.
    """
    passed = None
    for threshold in ordered_thresholds(fitted, budget, len(confidence)).tolist():
        is_answered = confidence >= threshold
        answered, errors = int(is_answered.sum()), int(wrong[is_answered].sum())
        bound = upper_bound(errors, answered)
        if bound > budget:
            return passed or NoThreshold(answered, errors, bound)
        passed = Threshold(
            budget=budget,
            level=LEVEL,
            confidence=threshold,
            documents=len(confidence),
            answered=answered,
            wrong=errors,
            error_bound=bound,
            abstained=1 - answered / len(confidence),
        )
    assert passed is not None  # there is at least one threshold
    return passed
