"""The current slowdown of a model's runs, by which predictions are corrected."""

import math

_HORIZON_SECONDS = 10.0
_PRIOR_SECONDS = 1.0
_MIN_FACTOR, _MAX_FACTOR = 0.1, 10.0


class SlowdownFactor:
    """The ratio of actual to calibrated seconds over a model's last runs.

    Predictions are multiplied by it, because other processes share the machine and batches save
    time. Each run counts by its length, and old runs count less.

    The factor is at least 1 until ``trust_costs``: the first estimates of short documents are too
    slow, and runs of these would make the predictions of longer documents too fast.
    """

    def __init__(self) -> None:
        self._calibrated = self._actual = _PRIOR_SECONDS
        self._min_factor = 1.0

    @property
    def value(self) -> float:
        """The factor of calibrated seconds."""
        return min(max(self._actual / self._calibrated, self._min_factor), _MAX_FACTOR)

    def observe(self, calibrated: float, actual: float) -> None:
        """Take a run into account.

        Args:
            calibrated: calibrated seconds of single runs of its documents.
            actual: measured seconds of the run.
        """
        fading = math.exp(-actual / _HORIZON_SECONDS)
        self._calibrated = self._calibrated * fading + calibrated
        self._actual = self._actual * fading + actual

    def trust_costs(self) -> None:
        """Allow factors below 1 from now on, for costs that are completely measured."""
        self._min_factor = _MIN_FACTOR
        if self._actual < self._calibrated:  # by the first estimates, which no longer count
            self._calibrated = self._actual = _PRIOR_SECONDS
