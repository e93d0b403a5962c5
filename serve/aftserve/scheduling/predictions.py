"""The predicted time until a document has its turn."""

import math
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
        client: str = "",
        seconds: float = math.inf,
        counts_run: bool = True,
    ) -> float:
        """Return the predicted time until a document that arrives now has its turn.

        Args:
            in_chunks: whether the document runs in chunks. Then it waits for all parts of other
                such documents; otherwise it runs between their parts.
            besides: documents that are left out of the prediction.
            model: model of the document; adds the release of another model's memory before it.
            client: client of the document, whose own documents come before it. Of others, only the
                share that they have of the engine until then.
            seconds: predicted time of the documents of the request; infinite to count all work.
            counts_run: whether a run without documents of the client counts.
        """
        run = self._queue.current_run
        if run is not None and run.measures:
            run = None  # see measurement_seconds
        if run is not None and besides and all(job.backlog is besides for job in run.batch):
            run = None
        if run is not None and not (counts_run or any(job.client == client for job in run.batch)):
            run = None
        before, runner, after = 0.0, "", 0.0
        if model is not None:
            before += self._queue.release_seconds(model)
        if run is not None:
            # A run that is late by some time is expected to take as long again.
            before += abs(run.started + run.predicted - time.monotonic())
            runner, after = run.client, run.seconds_after * run.model.slowdown.value
            if after and not in_chunks:
                # At most one part of a long document runs before each document.
                most = self._queue.backlog(besides).documents * run.calibrated
                after = min(after, most * run.model.slowdown.value)
        return before + self._queue.seconds_before(
            client, seconds, besides=besides, in_chunks=in_chunks, unfinished=(runner, after)
        )

    def measurement_seconds(self, seconds: float) -> float:
        """Return the maximum time of measurements within the next ``seconds`` of documents."""
        state, now = self._queue.state, time.monotonic()
        delay = self._turns.delay(seconds)
        if isinstance(state, Measuring) and not state.yields:
            delay += abs(state.run.started + state.run.predicted - now)
        return delay
