"""How much slower than calibrated the machine is at present."""

import math

_HORIZON_SECONDS = 10.0
_PRIOR_SECONDS = 1.0
_LIMITS = (0.1, 10.0)


class Pace:
    """The ratio of actual to calibrated seconds over the last runs.

    Others share the machine, and batches gain: with every prediction multiplied by this,
    it stays true. A run counts by its length, and an old one less.
    """

    def __init__(self) -> None:
        self._calibrated = self._actual = _PRIOR_SECONDS

    @property
    def value(self) -> float:
        """Multiplies calibrated seconds."""
        low, high = _LIMITS
        return min(max(self._actual / self._calibrated, low), high)

    def observe(self, calibrated: float, actual: float) -> None:
        """Takes a run into account.

        Args:
            calibrated: seconds its documents would take one by one.
            actual: seconds it took.
        """
        fading = math.exp(-actual / _HORIZON_SECONDS)
        self._calibrated = self._calibrated * fading + calibrated
        self._actual = self._actual * fading + actual
