"""Thresholds keep their error budget on new documents, as often as they promise."""

import re
from pathlib import Path

import numpy as np
import pytest
from calibrations import ANY_LABELS, ONE_LABEL, TWO_LABELS, draw
from numpy.typing import NDArray
from scipy.stats import binom, binomtest

from aftexport.calibration.calibrate import (
    NoThresholdError,
    calibrate,
    choose_threshold,
    ordered_thresholds,
    upper_bound,
)
from aftexport.calibration.fit import (
    MIN_DOCUMENTS,
    Sample,
    documents_for,
    documents_without_error,
    fit_count,
)
from aftexport.heads import Head
from aftexport.heads.calibration import FittedScalings, Scaling, Threshold, confidences

RUNS = 100


@pytest.mark.parametrize("head", [ONE_LABEL, TWO_LABELS, ANY_LABELS], ids=lambda head: head.task)
def test_budget_holds_on_new_documents(head: Head) -> None:
    """At most 5 % of the thresholds may exceed the budget, up to the luck of the draws."""
    generator = np.random.default_rng(1)
    new, _ = draw(generator, head, 30_000, log_temperature=0.4, slope=0.05, spread=5.0)
    budget, exceeded, found = 0.1, 0, 0
    for _ in range(RUNS):
        sample, _ = draw(generator, head, 900, log_temperature=0.4, slope=0.05, spread=5.0)
        answered = answered_by(sample, new, budget)
        if answered is not None:
            found += 1
            exceeded += new.is_wrong()[answered].mean() > budget
    assert found > 0.6 * RUNS
    assert exceeded <= binom.ppf(0.999, RUNS, 0.05)


def answered_by(sample: Sample, new: Sample, budget: float) -> NDArray[np.bool_] | None:
    """Return which new documents are answered; None if no threshold keeps the budget."""
    try:
        threshold = calibrate("logits", sample, budget).calibration.threshold
    except NoThresholdError:
        return None
    assert threshold is not None
    scores = threshold.fit.scores(new.head, new.logits, new.tokens)
    answered = confidences(new.head, new.logits, scores) >= threshold.confidence
    assert threshold.abstained == pytest.approx(1 - answered.mean(), abs=0.12)
    return np.asarray(answered)


def test_threshold_is_near_best() -> None:
    """Of documents with uniform confidence, those above 0.8 have an error rate of 0.1."""
    generator = np.random.default_rng(2)
    confidence = generator.random(40_000)
    wrong = generator.random(40_000) > confidence
    fit = FittedScalings(
        scalings=(Scaling(log_temperature=0.0),), min_tokens=1, max_tokens=9, documents=10_000
    )
    chosen = choose_threshold(fit, confidence[:10_000], confidence[10_000:], wrong[10_000:], 0.1)
    assert isinstance(chosen, Threshold)
    assert 0.8 < chosen.confidence < 0.84
    assert chosen.abstained == pytest.approx(chosen.confidence, abs=0.01)


def test_order_is_of_fitted_documents_only() -> None:
    generator = np.random.default_rng(3)
    confidence = generator.random(1000)
    thresholds = ordered_thresholds(confidence, 0.05, 500)
    assert (np.diff(thresholds) < 0).all()
    assert set(thresholds) <= set(confidence)
    assert thresholds[-1] == confidence.min()


@pytest.mark.parametrize(("wrong", "answered"), [(0, 299), (3, 500), (17, 40)])
def test_bound_is_clopper_pearson(wrong: int, answered: int) -> None:
    test = binomtest(wrong, answered, alternative="less")
    wanted = test.proportion_ci(0.95, method="exact").high
    assert upper_bound(wrong, answered) == pytest.approx(wanted, rel=1e-9)


def test_bound_of_nothing_is_one() -> None:
    assert upper_bound(0, 0) == upper_bound(4, 4) == 1.0


@pytest.mark.parametrize(("budget", "needed"), [(0.01, 299), (0.05, 59), (0.1, 29)])
def test_documents_without_error_are_just_enough(budget: float, needed: int) -> None:
    assert documents_without_error(budget) == needed
    assert upper_bound(0, needed) <= budget < upper_bound(0, needed - 1)


def test_documented_numbers_are_right() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "calibrate.md"
    rows = re.findall(
        r"an error budget of (\S+) \| (\d+) documents \| .*?, and (\d+)", page.read_text("utf-8")
    )
    assert len(rows) == 2
    for budget, documents, tested in rows:
        assert documents_for(float(budget)) == int(documents)
        assert documents_without_error(float(budget)) == int(tested)
    assert f"any calibration | {MIN_DOCUMENTS} documents" in page.read_text("utf-8")


@pytest.mark.parametrize("budget", [0.001, 0.01, 0.05, 0.2])
def test_needed_documents_suffice_for_both_parts(budget: float) -> None:
    needed = documents_for(budget)
    fitted = fit_count(needed)
    assert fitted >= MIN_DOCUMENTS
    assert needed - fitted >= documents_without_error(budget)
    fewer = needed - 1
    assert fewer - fit_count(fewer) < documents_without_error(budget)
