"""The turns of measurements on the engine: between documents, and a small share beside them."""

import asyncio
import time
from collections.abc import Callable

from aftserve.model.answers import Answer
from aftserve.model.cost_measurement import CostMeasurement
from aftserve.model.load import LoadedModel
from aftserve.scheduling.engine_state import Run

_SHARE = 0.1
"""Maximum share of the engine's time for measurements while documents wait."""


class MeasurementTurns:
    """The measurement of one model's costs while the server answers documents.

    Without documents in the queue, a measurement runs at once, and a document that arrives stops
    it. A server whose gaps between documents are short would never measure anything, and then never
    run batches. A measurement is therefore due once all of them take at most a tenth of the time.
    It then runs even if documents wait, and a document that arrives does not stop it.

    Only complete runs count against the tenth. Otherwise stopped runs in short gaps would use it
    up, and no measurement would ever be due. The stopped runs end with the measurements, which take
    at most ten times the predicted time of all complete ones.

    Args:
        model: the model that answers documents.
        clock: function that returns the current time; ``time.monotonic`` outside tests.
    """

    def __init__(self, model: LoadedModel, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.measurement: CostMeasurement = model.measurement
        self._classifier = model.classifier
        self._clock = clock
        self._since = clock()
        self._before = self.measurement.seconds

    @property
    def is_due(self) -> bool:
        """Whether the next measurement may run although documents wait."""
        return not self.measurement.is_done and self._allowed(0.0) >= self.measurement.next_seconds

    def delay(self, seconds: float) -> float:
        """Return the maximum time that measurements take from the next ``seconds`` of documents."""
        allowed = self._allowed(seconds)
        if self.measurement.is_done or allowed < self.measurement.next_seconds:
            return 0.0
        return allowed

    def make_run(self, create_future: "Callable[[], asyncio.Future[list[Answer] | None]]") -> Run:
        """Return a run of the next measurement."""
        return Run(
            (),
            self._classifier,
            0.0,
            self.measurement.next_seconds,
            create_future(),
            measurement=self.measurement,
        )

    def _allowed(self, later: float) -> float:
        """Return the unused time of the share, ``later`` seconds from now."""
        spent = self.measurement.seconds - self._before
        return _SHARE * (self._clock() + later - self._since) - spent
