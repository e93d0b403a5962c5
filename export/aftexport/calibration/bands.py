"""Bands of lengths with enough documents, and the reliability of the scores in each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from aftexport.calibration.calibration_error import calibration_error
from aftexport.calibration.requirements import MIN_DOCUMENTS
from aftexport.calibration.sample import Sample
from aftexport.heads.calibration import Band
from aftexport.heads.head import Double

RELIABILITY_BINS = 10


@dataclass(frozen=True)
class Bin:
    """The scores in a range of equal width, with the share that came true.

    Attributes:
        low, high: the range.
        count: the number of scores in it.
        mean_score: their mean.
        share: the share of them that came true.
    """

    low: float
    high: float
    count: int
    mean_score: float
    share: float

    def to_dict(self) -> dict[str, float]:
        """Return the fields for JSON."""
        return asdict(self)


def band_masks(tokens: NDArray[np.int64]) -> list[NDArray[np.bool_]]:
    """Return the documents of each band.

    A band starts and ends at powers of two. Neighbours are joined until each band has at least
    ``MIN_DOCUMENTS`` documents.
    """
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
    """Return the bands of a sample with their calibration errors.

    Args:
        sample: the documents.
        before: the scores ``[documents, names]`` without a calibration.
        after: the calibrated scores.
    """
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
