"""The predicted time until a document has its turn."""

import time

from aftserve.model.load import LoadedModel
from aftserve.scheduling.engine_state import Measuring
from aftserve.scheduling.job import Backlog
from aftserve.scheduling.measuring import MeasurementTurns
from aftserve.scheduling.queue import JobQueue


class Predictions:
    """Predictions from the queue and the current run; each model has its own slowdown.

    Args:
        queue: queue of the documents.
        turns: turns of measurements beside the documents.
    """

    def __init__(self, queue: JobQueue, turns: MeasurementTurns) -> None:
        self._queue = queue
        self._turns = turns

    @property
    def backlog_seconds(self) -> float:
        """Predicted time until every accepted document is answered."""
        return self.wait_seconds(in_chunks=True)

    def wait_seconds(
        self,
        *,
        in_chunks: bool,
        besides: Backlog | None = None,
        model: LoadedModel | None = None,
    ) -> float:
        """Return the predicted time until a document that arrives now has its turn.

        Args:
            in_chunks: whether the document runs in chunks. Then it waits for all parts of other
                such documents; otherwise it runs between their parts.
            besides: documents that are left out of the prediction.
            model: model of the document; adds the release of another model's memory before it.
        """
        run = self._queue.current_run
        if run is not None and run.measures:
            run = None  # see measurement_seconds
        if run is not None and besides and all(job.backlog is besides for job in run.batch):
            run = None
        seconds = self._queue.waiting_seconds(besides, in_chunks=in_chunks)
        if model is not None:
            seconds += self._queue.release_seconds(model)
        if run is None:
            return seconds
        # A run that is late by some time is expected to take as long again.
        running = abs(run.started + run.predicted - time.monotonic())
        after = run.seconds_after
        if after and not in_chunks:
            # At most one part of a long document runs before each document.
            after = min(after, self._queue.backlog(besides).documents * run.calibrated)
        return running + seconds + after * run.model.slowdown.value

    def measurement_seconds(self, seconds: float) -> float:
        """Return the maximum time of measurements within the next ``seconds`` of documents."""
        state, now = self._queue.state, time.monotonic()
        delay = self._turns.delay(seconds)
        if isinstance(state, Measuring) and not state.yields:
            delay += abs(state.run.started + state.run.predicted - now)
        return delay
