"""Bands of lengths with enough documents, and the reliability and error of the scores in each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.calibration.fit import Sample
from aftexport.calibration.requirements import MIN_DOCUMENTS
from aftexport.heads.calibration import Band, Estimate
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

    def to_dict(self) -> dict[str, float]:
        """Return the fields for JSON."""
        return asdict(self)


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
