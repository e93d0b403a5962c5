"""The calibration of one head from its labelled documents."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.calibration.bands import bands_of
from aftexport.calibration.calibration_error import calibration_error
from aftexport.calibration.fit import Fit, fit
from aftexport.calibration.requirements import check_truths, fit_count
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
        budget: the allowed error rate of answered documents; None for no threshold.

    Raises:
        UsageError: if there are too few documents.
        NoThresholdError: if no threshold keeps the budget.
    """
    choice = choose(name, sample, budget)
    fitted, tested = choice.fitted, choice.tested
    part = sample.part(fitted)
    before = sample.head.scores(sample.logits)
    after = np.empty_like(before)
    after[fitted] = _cross_fitted(part)
    after[tested] = _scores(choice.scalings, sample.part(tested), part)
    calibration = Calibration(
        method="platt" if sample.has_independent_labels else "temperature",
        scalings=choice.scalings,
        min_tokens=int(part.tokens.min()),
        max_tokens=int(part.tokens.max()),
        documents=len(part),
        error_before=calibration_error(*sample.observations(before)),
        error_after=calibration_error(*sample.observations(after)),
        bands=bands_of(sample, before, after),
        threshold=choice.threshold,
    )
    return CalibratedHead(sample, calibration, choice.fits, before, after)


@dataclass(frozen=True)
class Choice:
    """The scalings and the threshold of a head.

    Attributes:
        fitted: the indices of the documents of the fit, in random order.
        tested: those of the documents on which thresholds were tested.
        fits: the fit of each scaling.
        threshold: the threshold; None without a budget.
    """

    fitted: NDArray[np.int64]
    tested: NDArray[np.int64]
    fits: tuple[Fit, ...]
    threshold: Threshold | None

    @property
    def scalings(self) -> tuple[Scaling, ...]:
        """The scaling of each fit."""
        return tuple(fit.scaling for fit in self.fits)


def choose(name: str, sample: Sample, budget: float | None) -> Choice:
    """Fit the scalings, and choose the threshold on documents outside the fit.

    Without a budget, all documents are for the fit. Arguments and exceptions are those of
    ``calibrate``.
    """
    check_truths(name, sample.head, sample.truths, budget)
    order = np.random.default_rng(_SEED).permutation(len(sample))
    count = len(sample) if budget is None else fit_count(len(sample))
    fitted, tested = order[:count], order[count:]
    part = sample.part(fitted)
    fits = fit(part)
    threshold = None
    if budget is not None:
        scalings = tuple(one.scaling for one in fits)
        threshold = _threshold(name, scalings, part, sample.part(tested), budget)
    return Choice(fitted, tested, fits, threshold)


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
            f"to {chosen.error_bound:.2g} with 95 % probability.",
            "Label more documents, or allow a larger --error-budget.",
        )
    return chosen
