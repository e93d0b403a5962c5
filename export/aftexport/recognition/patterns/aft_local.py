"""The pattern of AFT-local, which is AFT-full with a bias that is 0 far from the diagonal:

    w[t,u] = w[t,u] where |t - u| < s, else 0

A number that is added to a whole row of w cancels. So any number that all of a row outside the
band shares counts as 0.
"""

import numpy as np
from numpy.typing import NDArray

from aftexport.recognition.patterns._weighted_mean import WeightedMean
from aftexport.recognition.patterns.aft_full import is_causal
from aftexport.recognition.patterns.pattern import LOWEST, Rewrite
from aftexport.recognition.terms import number


def rewrite(mean: WeightedMean, bias: NDArray[np.float64] | None) -> Rewrite | None:
    """Return the operator if the bias is a constant with a band narrower than itself."""
    gating = mean.gating
    if gating is None or bias is None:
        return None
    causal = mean.causal or is_causal(bias)
    band = band_of(bias, causal=causal)
    if band is None or (mean.eps and not _is_around(bias, band, causal=causal)):
        return None
    return Rewrite(
        "aft_local",
        "CausalAftLocal" if causal else "AftLocal",
        [gating[1], mean.spread_key_operand, mean.value_operand, band],
        mean.groups(mean.tokens),
        {"gate": gating[0], "eps": mean.eps},
        outside=number(mean.scale),
    )


def _is_around(bias: NDArray[np.float64], band: NDArray[np.float64], *, causal: bool) -> bool:
    """Return whether the diagonals of a bias are those of its band, and so 0 is outside of it."""
    middle = band.shape[1] - 1 if causal else band.shape[1] // 2
    return bool(np.array_equal(np.diagonal(bias), band[:, middle]))


def band_of(bias: NDArray[np.float64], *, causal: bool) -> NDArray[np.float64] | None:
    """Return ``[Tmax, 2s-1]`` (causal ``[Tmax, s]``) around the diagonal, None without a band.

    Rows that are constant throughout have no band either: they are AFT-simple.
    """
    tokens = len(bias)
    rows = np.arange(tokens)
    distance = np.abs(rows[:, None] - rows)
    counts = distance >= 0 if not causal else rows[:, None] >= rows
    # The entries farthest from the diagonal are outside the band, if any are.
    farthest = np.where(rows < tokens - 1 - rows, tokens - 1, 0) if not causal else 0 * rows
    outside = bias[rows, farthest]
    different = counts & (bias != outside[:, None])
    if not different.any() or not np.isfinite(outside).all() or (bias[counts] < LOWEST).any():
        return None
    window = int(distance[different].max()) + 1
    width = window if causal else 2 * window - 1
    # The last entry of a row always equals itself, so a band needs rows that are longer.
    if width >= tokens or window > tokens - 2:
        return None
    columns = rows[:, None] + np.arange(width) - (window - 1)
    inside = (columns >= 0) & (columns < tokens)
    band = bias[rows[:, None], np.clip(columns, 0, tokens - 1)] - outside[:, None]
    return np.where(inside, band, 0.0)
