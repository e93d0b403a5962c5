"""The numbers of documents that a calibration needs, with the reason for each."""

import math

import numpy as np
from numpy.typing import NDArray

from aftexport.calibration.fit import MIN_EVENTS_PER_PARAMETER
from aftexport.errors import UsageError
from aftexport.heads import Head

LEVEL = 0.95
"""The probability of every interval and bound."""
_MAX_HALF_INTERVAL = 0.1
MIN_DOCUMENTS = math.ceil(1.96**2 * 0.25 / _MAX_HALF_INTERVAL**2)
"""The least documents of a fit or a band: a share of them is within 0.1 with 95 %, so 97."""
_FIT_DIVISOR = 3
"""One third of the documents is for the fit if a threshold is tested on the others."""


def documents_without_error(budget: float) -> int:
    """Return the least answered documents that can show an error rate within a budget."""
    # Without any error, n documents bound the rate by 1 - 0.05 ** (1 / n) with 95 %.
    return math.ceil(math.log(1 - LEVEL) / math.log1p(-budget))


def documents_for(budget: float | None) -> int:
    """Return the least documents for a calibration, with a threshold if there is a budget."""
    if budget is None:
        return MIN_DOCUMENTS
    tested = documents_without_error(budget)
    return max(tested + MIN_DOCUMENTS, (_FIT_DIVISOR * tested - 1) // (_FIT_DIVISOR - 1))


def fit_count(documents: int) -> int:
    """Return the number of documents for the fit if a threshold is tested on the others."""
    return max(MIN_DOCUMENTS, documents // _FIT_DIVISOR)


def check_truths(name: str, head: Head, truths: NDArray[np.int64], budget: float | None) -> None:
    """Check that a head has enough labelled documents, also of each label.

    Raises:
        UsageError: if there are too few; the message has the number that is needed.
    """
    needed = documents_for(budget)
    if len(truths) < needed:
        reason = "" if budget is None else f" with --error-budget {budget:g}"
        raise UsageError(
            f"A calibration of the head {name!r}{reason} needs at least {needed} labelled "
            f"documents, got {len(truths)}.",
            "Label more documents."
            if budget is None
            else "Label more documents, or allow a larger --error-budget.",
        )
    share = 1.0 if budget is None else fit_count(len(truths)) / len(truths)
    if truths.ndim == 2:
        _check_independent_labels(name, head, truths, 2 * MIN_EVENTS_PER_PARAMETER / share)
    else:
        counts = np.bincount(truths, minlength=len(head.names))
        for label, count in zip(head.names, counts.tolist(), strict=True):
            _check_label(name, "with", label, count, MIN_EVENTS_PER_PARAMETER / share)


def _check_independent_labels(
    name: str, head: Head, truths: NDArray[np.int64], needed: float
) -> None:
    for label, held in zip(head.names, truths.sum(0).tolist(), strict=True):
        _check_label(name, "with", label, held, needed)
        _check_label(name, "without", label, len(truths) - held, needed)


def _check_label(name: str, relation: str, label: str, count: int, needed: float) -> None:
    if count < needed:
        raise UsageError(
            f"The head {name!r} needs at least {math.ceil(needed)} documents {relation} the label "
            f"{label!r}, got {count}.",
            "Label more documents of this kind.",
        )
