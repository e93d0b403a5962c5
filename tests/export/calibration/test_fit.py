"""Scalings are those that the labels were drawn by, and trends are found only where they are."""

import numpy as np
import pytest
from calibrations import ANY_LABELS, ONE_LABEL, TWO_LABELS, draw
from scipy.optimize import check_grad
from scipy.stats import binom

from aftexport.calibration.fit import TREND_LEVEL, Sample, _platt_loss, _temperature_loss, fit
from aftexport.heads import Head


@pytest.mark.parametrize("head", [ONE_LABEL, TWO_LABELS])
@pytest.mark.parametrize("slope", [0.0, 0.08])
def test_temperature_is_recovered(head: Head, slope: float) -> None:
    generator = np.random.default_rng(3)
    sample, _ = draw(generator, head, 20_000, log_temperature=-0.3, slope=slope)
    (found,) = fit(sample)
    assert (found.scaling.slope != 0) == (slope != 0)
    assert found.scaling.slope == pytest.approx(slope, abs=0.02)
    middle = found.scaling.log_temperature + 10 * found.scaling.slope
    assert middle == pytest.approx(-0.3 + 10 * slope, abs=0.05)
    assert found.scaling.bias == 0
    assert found.loss_after < found.loss_before


def test_each_label_has_its_own_scaling() -> None:
    """Only the second label has a trend, and only the third a bias."""
    generator = np.random.default_rng(4)
    known = [
        {"log_temperature": 0.5}, {"log_temperature": -0.6, "slope": 0.1},
        {"log_temperature": 0.2, "bias": -1.5},
    ]  # fmt: skip
    parts = [draw(np.random.default_rng(7), ANY_LABELS, 20_000, **one)[0] for one in known]
    lengths = parts[0].tokens
    assert all((part.tokens == lengths).all() for part in parts)
    logits = np.stack([part.logits[:, i] for i, part in enumerate(parts)], 1)
    sample = Sample(ANY_LABELS, logits, lengths, parts[0].truths)
    order = generator.permutation(len(sample))
    found = fit(sample.part(order))
    assert [one.scaling.slope != 0 for one in found] == [False, True, False]
    assert found[1].scaling.slope == pytest.approx(0.1, abs=0.02)
    assert found[0].scaling.log_temperature == pytest.approx(0.5, abs=0.05)
    assert [one.scaling.bias for one in found] == pytest.approx([0, 0, -1.5], abs=0.1)


@pytest.mark.parametrize("head", [ONE_LABEL, TWO_LABELS, ANY_LABELS])
def test_false_trends_are_rare(head: Head) -> None:
    """Without a trend, the share of fits that find one is within the level of the test."""
    generator = np.random.default_rng(5)
    runs = 200
    false = 0
    for _ in range(runs):
        sample, _ = draw(generator, head, 300, log_temperature=0.7)
        false += any(one.scaling.slope != 0 for one in fit(sample))
    assert false <= binom.ppf(0.999, runs, TREND_LEVEL)


def test_trend_is_found_in_few_documents() -> None:
    generator = np.random.default_rng(6)
    found = [
        fit(draw(generator, ONE_LABEL, 500, log_temperature=-1.0, slope=0.15)[0])[0]
        for _ in range(40)
    ]
    assert np.mean([one.scaling.slope != 0 for one in found]) >= 0.9
    slopes = [one.scaling.slope for one in found if one.scaling.slope]
    assert np.mean(slopes) == pytest.approx(0.15, abs=0.03)


def test_equal_lengths_have_no_trend() -> None:
    sample, _ = draw(np.random.default_rng(8), ONE_LABEL, 500)
    equal = Sample(sample.head, sample.logits, np.full(500, 64), sample.truths)
    (found,) = fit(equal)
    assert (found.p_value, found.scaling.slope) == (None, 0)


def test_faultless_answers_keep_doubt() -> None:
    """Without smoothed targets the temperature of documents without any error would be 0."""
    logits = np.eye(3)[np.arange(300) % 3] * 4
    sample = Sample(ONE_LABEL, logits, np.full(300, 9), logits.argmax(1))
    (found,) = fit(sample)
    scores = ONE_LABEL.scores(logits / np.exp(found.scaling.log_temperature))
    assert 1 / 900 < 1 - scores.max(1).mean() < 1 / 100


def test_gradients_are_derivatives() -> None:
    sample, _ = draw(np.random.default_rng(9), ONE_LABEL, 50)
    several, _ = draw(np.random.default_rng(9), ANY_LABELS, 50)
    platt = _platt_loss(several.logits[:, 0], several.truths[:, 0].astype(np.float64))
    for loss in (_temperature_loss(sample), platt):
        start = np.random.default_rng(1).normal(0, 0.3, 50)
        error = check_grad(
            lambda x, at=loss: at(x, 0.2)[0], lambda x, at=loss: at(x, 0.2)[1], start
        )
        assert error < 1e-4
    step = 1e-6
    by_bias = (platt(np.zeros(50), step)[0] - platt(np.zeros(50), -step)[0]) / (2 * step)
    assert platt(np.zeros(50), 0.0)[2] == pytest.approx(by_bias, rel=1e-6)


@pytest.mark.parametrize("head", [ONE_LABEL, TWO_LABELS, ANY_LABELS])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_size_of_logits_does_not_matter(head: Head, factor: float) -> None:
    sample, _ = draw(np.random.default_rng(10), head, 1000)
    large = Sample(head, sample.logits * factor, sample.tokens, sample.truths)
    for one, other in zip(fit(sample), fit(large), strict=True):
        assert other.loss_after == pytest.approx(one.loss_after, abs=1e-6)
        shift = other.scaling.log_temperature - one.scaling.log_temperature
        assert shift == pytest.approx(np.log(factor), abs=0.01)
