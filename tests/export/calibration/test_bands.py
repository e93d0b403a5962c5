"""The estimate of the calibration error has no bias by noise, and its interval covers."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import binom

from aftexport.calibration.calibrate import band_masks, bins_of, calibration_error
from aftexport.calibration.fit import MIN_DOCUMENTS


@pytest.mark.parametrize("shift", [0.05, 0.1])
def test_known_error_is_covered(shift: float) -> None:
    generator = np.random.default_rng(1)
    runs, covered, values = 60, 0, []
    for _ in range(runs):
        scores = generator.uniform(0.2, 0.9, (800, 1))
        outcomes = (generator.random((800, 1)) < scores - shift).astype(np.float64)
        found = calibration_error(scores, outcomes)
        values.append(found.value)
        covered += found.low <= shift <= found.high
    assert np.mean(values) == pytest.approx(shift, abs=0.01)
    assert covered >= binom.ppf(0.001, runs, 0.95) - 3  # the bootstrap is approximate


def test_true_probabilities_have_small_error() -> None:
    generator = np.random.default_rng(2)
    scores = generator.random((5000, 3))
    outcomes = (generator.random((5000, 3)) < scores).astype(np.float64)
    found = calibration_error(scores, outcomes)
    assert found.low <= found.value <= found.high < 0.02
    assert found == calibration_error(scores, outcomes)


def test_bands_have_enough_documents() -> None:
    generator = np.random.default_rng(3)
    tokens = np.concatenate([
        generator.integers(1, 40, 150), generator.integers(64, 128, 400), [5000] * 20, [2**20] * 5
    ])  # fmt: skip
    masks = band_masks(tokens)
    assert all(mask.sum() >= MIN_DOCUMENTS for mask in masks)
    assert (np.sum(masks, 0) == 1).all()
    assert len(masks) >= 2
    ends = [(tokens[mask].min(), tokens[mask].max()) for mask in masks]
    assert all(before[1] < after[0] for before, after in pairwise(ends))


def test_few_documents_share_one_band() -> None:
    (mask,) = band_masks(np.array([1, 2, 9, 5000]))
    assert mask.all()


def test_bins_count_every_score() -> None:
    scores = np.array([[0.0], [0.05], [0.95], [1.0]])
    first, last = bins_of(scores, np.array([[0.0], [1.0], [1.0], [1.0]]))
    assert (first.low, first.count, first.mean_score, first.share) == (0.0, 2, 0.025, 0.5)
    assert (last.high, last.count, last.share) == (1.0, 2, 1.0)
