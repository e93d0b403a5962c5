"""The calibration of one head from its labelled documents."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.calibration.bands import bands_of
from aftexport.calibration.calibration_error import calibration_error
from aftexport.calibration.fit import Fit, fit
from aftexport.calibration.requirements import check_sample, fit_count
from aftexport.calibration.sample import Sample
from aftexport.calibration.thresholds import NoThreshold, choose_threshold
from aftexport.errors import AftexportError
from aftexport.heads.calibration import Calibration, Scaling, Threshold, confidences, scaled
from aftexport.heads.head import Double

FOLDS = 5
_SEED = 0


class NoThresholdError(AftexportError):
    """No threshold keeps the error budget."""

    exit_code = 1


@dataclass(frozen=True)
class CalibratedHead:
    """A head with its calibration.

    Attributes:
        sample: the labelled documents.
        calibration: the calibration.
        fits: the fit of each scaling.
        before: the scores ``[documents, names]`` without a calibration.
        after: the calibrated scores, of each document by scalings that were fitted without it.
    """

    sample: Sample
    calibration: Calibration
    fits: tuple[Fit, ...]
    before: Double
    after: Double


def calibrate(name: str, sample: Sample, budget: float | None = None) -> CalibratedHead:
    """Fit the calibration of a head, and measure it on documents outside the fit.

    Args:
        name: the name of the head, for messages.
        sample: its labelled documents.
        budget: the allowed error rate of answered documents; None for no threshold. With a
            budget, one part of the documents is for the fit and the other for the threshold.

    Raises:
        UsageError: if there are too few documents.
        NoThresholdError: if no threshold keeps the budget.
    """
    check_sample(name, sample, budget)
    order = np.random.default_rng(_SEED).permutation(len(sample))
    count = len(sample) if budget is None else fit_count(len(sample))
    fitted, tested = order[:count], order[count:]
    part = sample.part(fitted)
    fits = fit(part)
    scalings = tuple(one.scaling for one in fits)
    before = sample.head.scores(sample.logits)
    after = np.empty_like(before)
    after[fitted] = _cross_fitted(part)
    after[tested] = _scores(scalings, sample.part(tested), part)
    calibration = Calibration(
        method="platt" if sample.has_independent_labels else "temperature",
        scalings=scalings,
        min_tokens=int(part.tokens.min()),
        max_tokens=int(part.tokens.max()),
        documents=len(part),
        error_before=calibration_error(*sample.observations(before)),
        error_after=calibration_error(*sample.observations(after)),
        bands=bands_of(sample, before, after),
        threshold=None
        if budget is None
        else _threshold(name, scalings, part, sample.part(tested), budget),
    )
    return CalibratedHead(sample, calibration, fits, before, after)


def _cross_fitted(sample: Sample) -> Double:
    """Return calibrated scores, of each fold by scalings that were fitted to the other folds."""
    scores = np.empty((len(sample), len(sample.head.names)))
    folds: NDArray[np.int64] = np.arange(len(sample)) % FOLDS  # the documents are in random order
    for fold in range(FOLDS):
        others, own = sample.part(folds != fold), sample.part(folds == fold)
        scalings = tuple(one.scaling for one in fit(others))
        scores[folds == fold] = _scores(scalings, own, others)
    return scores


def _scores(scalings: tuple[Scaling, ...], sample: Sample, fitted: Sample) -> Double:
    """Return calibrated scores; a length outside those of the fit counts as the nearest one."""
    tokens = np.clip(sample.tokens, fitted.tokens.min(), fitted.tokens.max())
    return sample.head.scores(scaled(scalings, sample.logits, tokens))


def _threshold(
    name: str, scalings: tuple[Scaling, ...], fitted: Sample, tested: Sample, budget: float
) -> Threshold:
    confidence, confidence_tested = (
        confidences(part.head, part.logits, _scores(scalings, part, fitted))
        for part in (fitted, tested)
    )
    chosen = choose_threshold(confidence, confidence_tested, tested.is_wrong(), budget)
    if isinstance(chosen, NoThreshold):
        raise NoThresholdError(
            f"Expected a threshold of the head {name!r} with an error rate of at most {budget:g}, "
            f"got {chosen.wrong} wrong of the {chosen.answered} most certain answers, a rate of up "
            f"to {chosen.error_bound:.2g} with 95 %.",
            "Label more documents, or allow a larger --error-budget.",
        )
    return chosen
