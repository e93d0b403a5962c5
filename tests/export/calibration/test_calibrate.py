"""Calibrated scores agree with known posteriors, at every length, on documents outside the fit."""

import numpy as np
import pytest
from calibrations import ANY_LABELS, ONE_LABEL, TWO_LABELS, draw
from numpy.typing import NDArray
from scipy.stats import binom

from aftexport.calibration.calibrate import CalibratedHead, NoThresholdError, bins_of, calibrate
from aftexport.calibration.fit import Sample
from aftexport.errors import UsageError
from aftexport.heads import Head

HEADS = [ONE_LABEL, TWO_LABELS, ANY_LABELS]


@pytest.fixture(scope="module", params=HEADS, ids=lambda head: head.task)
def drawn(request: pytest.FixtureRequest) -> tuple[CalibratedHead, NDArray[np.float64]]:
    """A calibration on 20,000 documents of scores that are off by length, and the posteriors."""
    generator = np.random.default_rng(1)
    sample, posterior = draw(generator, request.param, 20_000, log_temperature=-0.2, slope=0.09)
    return calibrate("logits", sample), posterior


def test_scores_become_posteriors(drawn: tuple[CalibratedHead, NDArray[np.float64]]) -> None:
    found, posterior = drawn
    calibration, sample = found.calibration, found.sample
    assert calibration.depends_on_length
    assert calibration.error_before.value > 0.05
    assert calibration.error_after.value < 0.02
    assert calibration.error_after.low <= calibration.error_after.value
    assert calibration.error_after.value <= calibration.error_after.high < 0.02
    assert np.abs(found.after - posterior).mean() < 0.01
    assert np.abs(inside_fit(found) - posterior).mean() < 0.01
    for band in calibration.bands:
        assert band.error_after.low < 0.02, band
        inside = (sample.tokens >= band.min_tokens) & (sample.tokens <= band.max_tokens)
        assert inside.sum() == band.documents
        assert np.abs(found.after[inside] - posterior[inside]).mean() < 0.02
    assert sum(band.documents for band in calibration.bands) == len(sample)


def inside_fit(found: CalibratedHead) -> NDArray[np.float64]:
    """Return the scores of the final calibration."""
    sample = found.sample
    return found.calibration.scores(sample.head, sample.logits, sample.tokens)


def test_shares_are_within_binomial_bounds(
    drawn: tuple[CalibratedHead, NDArray[np.float64]],
) -> None:
    """In each band and bin, the share that came true is one that its mean score explains."""
    found, _ = drawn
    sample = found.sample
    outside, total = 0, 0
    for band in found.calibration.bands:
        inside = (sample.tokens >= band.min_tokens) & (sample.tokens <= band.max_tokens)
        part = sample.part(inside)
        for one in bins_of(*part.observations(found.after[inside])):
            low, high = binom.ppf([0.005, 0.995], one.count, one.mean_score)
            outside += not low <= one.share * one.count <= high
            total += 1
    assert total > 50
    assert outside <= binom.ppf(0.999, total, 0.01)


def test_after_is_of_other_documents() -> None:
    """Each score comes from a fit without its document, so that the loss is larger."""
    generator = np.random.default_rng(3)
    sample, _ = draw(generator, ANY_LABELS, 200)
    found = calibrate("logits", sample)
    outside, inside = (
        -np.log(np.where(sample.truths == 1, scores, 1 - scores)).mean()
        for scores in (found.after, inside_fit(found))
    )
    assert outside > inside


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.task)
def test_budget_splits_documents(head: Head) -> None:
    generator = np.random.default_rng(4)
    sample, _ = draw(generator, head, 6000, log_temperature=0.8, spread=6.0)
    found = calibrate("logits", sample, budget=0.05)
    threshold = found.calibration.threshold
    assert threshold is not None
    assert threshold.fit is not None
    assert (threshold.fit.documents, threshold.documents) == (2000, 4000)
    assert threshold.error_bound <= 0.05
    assert threshold.abstained == pytest.approx(1 - threshold.answered / 4000)
    assert 0 < threshold.answered < 4000


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.task)
def test_budget_costs_no_accuracy(head: Head) -> None:
    """The probabilities are fitted on all documents, with and without a budget."""
    shape = {"log_temperature": -0.3, "slope": 0.07, "spread": 6.0}
    sample, posterior = draw(np.random.default_rng(8), head, 600, **shape)
    found, without = (calibrate("logits", sample, budget) for budget in (0.2, None))
    assert found.calibration.threshold is not None
    assert found.calibration.model_copy(update={"threshold": None}) == without.calibration
    np.testing.assert_array_equal(found.after, without.after)
    fit = found.calibration.threshold.fit
    assert fit is not None
    errors = [
        np.abs(one.scores(head, sample.logits, sample.tokens) - posterior).mean()
        for one in (found.calibration, fit)
    ]
    assert errors[0] < errors[1]


def test_hopeless_budget_is_refused() -> None:
    generator = np.random.default_rng(5)
    sample, _ = draw(generator, ONE_LABEL, 2000, spread=0.1)
    with pytest.raises(NoThresholdError, match=r"error rate of at most 0\.05") as caught:
        calibrate("logits", sample, budget=0.05)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("head", "count", "budget", "message"),
    [
        (ONE_LABEL, 96, None, "at least 97 labelled documents, got 96"),
        (ONE_LABEL, 300, 0.01, "at least 448 labelled documents, got 300"),
        (TWO_LABELS, 100, 0.1, "at least 126 labelled documents, got 100"),
    ],
)
def test_few_documents_are_refused(
    head: Head, count: int, budget: float | None, message: str
) -> None:
    sample, _ = draw(np.random.default_rng(6), head, count)
    with pytest.raises(UsageError, match=message):
        calibrate("logits", sample, budget)


def test_rare_labels_are_refused() -> None:
    sample, _ = draw(np.random.default_rng(7), ONE_LABEL, 200)
    truths = sample.truths % 2
    truths[:9] = 2
    with pytest.raises(UsageError, match="at least 10 documents with the label 'c', got 9"):
        calibrate("logits", Sample(ONE_LABEL, sample.logits, sample.tokens, truths))
    several, _ = draw(np.random.default_rng(7), ANY_LABELS, 200)
    held = several.truths.copy()
    held[:, 1] = np.arange(200) >= 19
    with pytest.raises(UsageError, match=r"at least 20 documents without the label 'b', got 19"):
        calibrate("flags", Sample(ANY_LABELS, several.logits, several.tokens, held))
    held[:, 1] = np.arange(200) < 19
    with pytest.raises(UsageError, match=r"at least 20 documents with the label 'b', got 19"):
        calibrate("flags", Sample(ANY_LABELS, several.logits, several.tokens, held))
