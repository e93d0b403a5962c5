"""The expected calibration error of scores, with a bootstrap interval."""

import numpy as np
from numpy.typing import NDArray

from aftexport.heads.calibration import Estimate
from aftexport.heads.head import Double

MAX_BINS = 15
MIN_BIN_DOCUMENTS = 20
RESAMPLES = 400
"""The number of resamples, a multiple of the block."""
_LEVELS = (2.5, 97.5)
_BLOCK = 50
"""The number of resamples that are counted at a time, which bounds the memory."""


def calibration_error(scores: Double, outcomes: Double) -> Estimate:
    """Return the expected calibration error with its 95 % interval.

    Each column is cut into bins of equally many documents. The error of a bin is the distance
    between its mean score and its share of outcomes, and columns are averaged. Noise in the bins
    only adds to this error. So the bias and the interval are taken from a bootstrap over the
    documents (basic bootstrap: Davison and Hinkley, "Bootstrap methods and their application",
    1997).

    Args:
        scores: scores ``[documents, columns]``.
        outcomes: 1 where the score came true, else 0.
    """
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
