"""The numbers of documents that a calibration needs, with the reason for each."""

import math

import numpy as np

from aftexport.calibration.fit import MIN_EVENTS_PER_PARAMETER
from aftexport.calibration.sample import Sample
from aftexport.errors import UsageError

LEVEL = 0.95
"""The probability of every interval and bound."""
_MAX_HALF_INTERVAL = 0.1
MIN_DOCUMENTS = math.ceil(1.96**2 * 0.25 / _MAX_HALF_INTERVAL**2)
"""The least documents of a fit or a band: a share of them is within 0.1 with 95 %, so 97."""
_FIT_DIVISOR = 3
"""One third of the documents is for the fit if a threshold is tested on the others."""


def documents_without_error(budget: float) -> int:
    """Return the least answered documents that can show an error rate within a budget.

    Without any error, ``n`` documents bound the rate by ``1 - 0.05 ** (1 / n)`` with 95 %.
    """
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


def check_count(documents: int, budget: float | None, name: str | None = None) -> None:
    """Check the number of documents.

    Args:
        documents: the number of labelled documents.
        budget: the error budget; None for no threshold.
        name: the head that they label; None for any.

    Raises:
        UsageError: if there are too few; the message has the number that is needed.
    """
    needed = documents_for(budget)
    if documents < needed:
        reason = "" if budget is None else f" with --error-budget {budget:g}"
        head = "" if name is None else f" of the head {name!r}"
        raise UsageError(
            f"A calibration{head}{reason} needs at least {needed} labelled documents, got "
            f"{documents}.",
            "Label more documents."
            if budget is None
            else "Label more documents, or allow a larger --error-budget.",
        )


def check_sample(name: str, sample: Sample, budget: float | None) -> None:
    """Check that there are enough documents, also of each label.

    Args:
        name: the name of the head.
        sample: its labelled documents.
        budget: the error budget; None for no threshold.

    Raises:
        UsageError: if there are too few; the message has the number that is needed.
    """
    check_count(len(sample), budget, name)
    share = 1.0 if budget is None else fit_count(len(sample)) / len(sample)
    if sample.has_independent_labels:
        _check_independent_labels(name, sample, math.ceil(2 * MIN_EVENTS_PER_PARAMETER / share))
        return
    needed = math.ceil(MIN_EVENTS_PER_PARAMETER / share)
    counts = np.bincount(sample.truths, minlength=len(sample.head.names))
    for label, count in zip(sample.head.names, counts.tolist(), strict=True):
        if count < needed:
            raise UsageError(
                f"The head {name!r} needs at least {needed} documents with the label {label!r}, "
                f"got {count}.",
                "Label more documents of this kind.",
            )


def _check_independent_labels(name: str, sample: Sample, needed: int) -> None:
    for label, held in zip(sample.head.names, sample.truths.sum(0).tolist(), strict=True):
        for count, relation in ((held, "with"), (len(sample) - held, "without")):
            if count < needed:
                raise UsageError(
                    f"The head {name!r} needs at least {needed} documents {relation} the label "
                    f"{label!r} for a temperature and a bias, got {count}.",
                    "Label more documents of this kind.",
                )
