"""The calibration of one head from its labelled documents, and its error by bands of lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from aftexport.calibration.fit import (
    LEVEL,
    MIN_DOCUMENTS,
    Fit,
    Sample,
    check_truths,
    documents_without_error,
    fit,
    fit_count,
)
from aftexport.errors import AftexportError
from aftexport.heads.calibration import (
    Band,
    Calibration,
    Estimate,
    FittedScalings,
    Threshold,
    confidences,
)
from aftexport.heads.head import Double

RELIABILITY_BINS = 10


@dataclass(frozen=True)
class Bin:
    """The scores from ``low`` to ``high``, with the share that came true."""

    low: float
    high: float
    count: int
    mean_score: float
    share: float


def band_masks(tokens: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    """Return the documents of each band, which starts and ends at powers of two."""
    # Neighbours are joined until each band has at least MIN_DOCUMENTS documents.
    power = np.log2(tokens).astype(np.int64)
    bands: list[list[int]] = [[]]
    for one in np.unique(power):
        if np.isin(power, bands[-1]).sum() >= MIN_DOCUMENTS:
            bands.append([])
        bands[-1].append(int(one))
    if len(bands) > 1 and np.isin(power, bands[-1]).sum() < MIN_DOCUMENTS:
        rest = bands.pop()
        bands[-1] += rest
    return [np.isin(power, band) for band in bands]


def bands_of(sample: Sample, before: Double, after: Double) -> tuple[Band, ...]:
    """Return the bands of a sample with the errors of its scores ``[documents, names]``."""
    found = []
    for mask in band_masks(sample.tokens):
        part = sample.part(mask)
        error_before, error_after = (
            calibration_error(*part.observations(scores[mask])) for scores in (before, after)
        )
        found.append(
            Band(
                min_tokens=int(part.tokens.min()),
                max_tokens=int(part.tokens.max()),
                documents=len(part),
                error_before=error_before,
                error_after=error_after,
            )
        )
    return tuple(found)


def bins_of(scores: Double, outcomes: Double) -> Sequence[Bin]:
    """Return the bins of a reliability diagram that are not empty, over all columns."""
    place = np.minimum((scores * RELIABILITY_BINS).astype(np.int64), RELIABILITY_BINS - 1)
    return [
        Bin(
            low=index / RELIABILITY_BINS,
            high=(index + 1) / RELIABILITY_BINS,
            count=int((place == index).sum()),
            mean_score=float(scores[place == index].mean()),
            share=float(outcomes[place == index].mean()),
        )
        for index in np.unique(place).tolist()
    ]


MAX_BINS = 15
MIN_BIN_DOCUMENTS = 20
RESAMPLES = 400
"""The number of resamples, a multiple of the block."""
_LEVELS = (2.5, 97.5)
_BLOCK = 50
"""The number of resamples that are counted at a time, which bounds the memory."""


def calibration_error(scores: Double, outcomes: Double) -> Estimate:
    """Return the expected calibration error of scores ``[documents, columns]`` and its interval."""
    # Each column is cut into bins of equally many documents. The error of a bin is the distance
    # between its mean score and its share of outcomes, and columns are averaged. Noise in the bins
    # only adds to this error. So the bias and the interval are taken from a bootstrap over the
    # documents (basic bootstrap: Davison and Hinkley, "Bootstrap methods and their application",
    # 1997).
    count, columns = scores.shape
    bins = max(1, min(MAX_BINS, count // MIN_BIN_DOCUMENTS))
    starts = np.arange(bins) * count // bins
    orders = np.argsort(scores, axis=0, kind="stable")
    gaps = np.take_along_axis(scores - outcomes, orders, 0)

    def errors(weights: NDArray[np.int64]) -> Double:
        total = np.zeros(len(weights))
        for column in range(columns):
            weighted = weights[:, orders[:, column]] * gaps[:, column]
            total += np.abs(np.add.reduceat(weighted, starts, axis=1)).sum(1)
        return np.asarray(total / count / columns)

    plain = float(errors(np.ones((1, count), np.int64))[0])
    generator = np.random.default_rng(0)
    resampled = np.concatenate(
        [errors(_weights(generator, count)) for _ in range(RESAMPLES // _BLOCK)]
    )
    low, high = np.percentile(resampled, _LEVELS)
    value = 2 * plain - resampled.mean()
    return Estimate(
        value=max(0.0, float(value)),
        low=max(0.0, float(2 * plain - high)),
        high=max(0.0, float(2 * plain - low)),
    )


def _weights(generator: np.random.Generator, count: int) -> NDArray[np.int64]:
    """Return how often each document is drawn, in a block of resamples."""
    draws = generator.integers(count, size=(_BLOCK, count))
    return np.stack([np.bincount(one, minlength=count) for one in draws])


FOLDS = 5
_SEED = 0


class NoThresholdError(AftexportError):
    """No threshold keeps the error budget."""

    exit_code = 1


@dataclass(frozen=True)
class CalibratedHead:
    """A head with its calibration, and the scores ``[documents, names]`` of its documents."""

    sample: Sample
    calibration: Calibration
    fits: tuple[Fit, ...]  # of each scaling
    before: Double
    after: Double  # the calibrated scores, of each document by scalings that were fitted without it


def calibrate(name: str, sample: Sample, budget: float | None = None) -> CalibratedHead:
    """Fit the calibration of a head, and measure it on documents outside the fit.

    ``budget`` is the allowed error rate of answered documents; None for no threshold.

    Raises:
        UsageError: if there are too few documents.
        NoThresholdError: if no threshold keeps the budget.
    """
    check_truths(name, sample.head, sample.truths, budget)
    order = np.random.default_rng(_SEED).permutation(len(sample))
    threshold = None if budget is None else _threshold(name, sample.part(order), budget)
    before = sample.head.scores(sample.logits)
    after = np.empty_like(before)
    after[order] = _cross_fitted(sample.part(order))
    fits = fit(sample)
    calibration = Calibration(
        method="platt" if sample.has_independent_labels else "temperature",
        **dict(_fitted(fits, sample)),
        error_before=calibration_error(*sample.observations(before)),
        error_after=calibration_error(*sample.observations(after)),
        bands=bands_of(sample, before, after),
        threshold=threshold,
    )
    return CalibratedHead(sample, calibration, fits, before, after)


def _cross_fitted(sample: Sample) -> Double:
    """Return calibrated scores, of each fold by scalings that were fitted to the other folds."""
    scores = np.empty((len(sample), len(sample.head.names)))
    folds: NDArray[np.int64] = np.arange(len(sample)) % FOLDS  # the documents are in random order
    for fold in range(FOLDS):
        others, own = sample.part(folds != fold), sample.part(folds == fold)
        scores[folds == fold] = _fitted(fit(others), others).scores(
            own.head, own.logits, own.tokens
        )
    return scores


def _fitted(fits: tuple[Fit, ...], sample: Sample) -> FittedScalings:
    """Return the scalings of fits to a sample, with its lengths."""
    return FittedScalings(
        scalings=tuple(one.scaling for one in fits),
        min_tokens=int(sample.tokens.min()),
        max_tokens=int(sample.tokens.max()),
        documents=len(sample),
    )


def _threshold(name: str, sample: Sample, budget: float) -> Threshold:
    """Return the threshold from documents in random order: some fit scalings, the others test."""
    # The probabilities are fitted on all documents. The confidence has scalings of its own, since
    # the bound holds only for scalings that do not depend on the tested documents.
    count = fit_count(len(sample))
    index = np.arange(len(sample))
    first, tested = sample.part(index < count), sample.part(index >= count)
    fitted = _fitted(fit(first), first)
    confidence, confidence_tested = (
        confidences(part.head, part.logits, fitted.scores(part.head, part.logits, part.tokens))
        for part in (first, tested)
    )
    chosen = choose_threshold(fitted, confidence, confidence_tested, tested.is_wrong(), budget)
    if isinstance(chosen, NoThreshold):
        raise NoThresholdError(
            f"Expected a threshold of the head {name!r} with an error rate of at most {budget:g}, "
            f"got {chosen.wrong} wrong of the {chosen.answered} most certain answers, a rate of up "
            f"to {chosen.error_bound:.2g} with 95 % probability.",
            "Label more documents, or allow a larger --error-budget.",
        )
    return chosen


# Thresholds are chosen by fixed-sequence testing as in "Learn then test: Calibrating predictive
# algorithms to achieve risk control" (Angelopoulos, Bates, Candès, Jordan and Lei, 2021). One part
# of the documents fits scalings and orders the thresholds. The other part tests them in this order
# until one fails. Because scalings and order do not depend on the tested documents, every test
# keeps its level, and no correction for the choice among thresholds is needed.
CANDIDATES = 200
"""The number of thresholds, which answer equally many more of the fitted documents each."""


@dataclass(frozen=True)
class NoThreshold:
    """The reason why no threshold keeps the budget: the counts and the bound of the first test."""

    answered: int
    wrong: int
    error_bound: float


def upper_bound(wrong: int, answered: int) -> float:
    """Return the upper bound of Clopper and Pearson (1934) on an error rate."""
    if wrong >= answered:
        return 1.0
    return float(betaincinv(wrong + 1, answered - wrong, LEVEL))


def ordered_thresholds(confidence: Double, budget: float, tested: int) -> Double:
    """Return thresholds in the order of their tests, from the documents of the fit only."""
    # The first threshold is the one most likely to pass, by the mean confidence of the documents
    # that it answers. The next ones answer more documents each.
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
    fit: FittedScalings,
    fitted: Double,
    confidence: Double,
    wrong: NDArray[np.bool_],
    budget: float,
) -> Threshold | NoThreshold:
    """Return the smallest threshold before the first that fails its test.

    ``fitted`` is the confidence of the documents of the fit; the others have a ``confidence`` by
    the same scalings, ``fit``, and may be ``wrong``.
    """
    passed = None
    for threshold in ordered_thresholds(fitted, budget, len(confidence)).tolist():
        is_answered = confidence >= threshold
        answered, errors = int(is_answered.sum()), int(wrong[is_answered].sum())
        bound = upper_bound(errors, answered)
        if bound > budget:
            return passed or NoThreshold(answered, errors, bound)
        passed = Threshold(
            fit=fit,
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
