"""Admission of requests, by seconds of work rather than by number."""

from collections.abc import Sequence

from aftserve.errors import BusyError, DeadlineError, DocumentTooLongError
from aftserve.model.load import LoadedModel
from aftserve.scheduling.job import Backlog
from aftserve.scheduling.scheduler import Scheduler

_OVERHEAD_SECONDS = 0.005
"""Time of a request outside the engine, and the clock's resolution."""


class Admission:
    """The admission of requests that can be answered in time.

    Args:
        scheduler: scheduler whose queue the request would join.
        max_queue_seconds: maximum predicted time of the documents before it.
    """

    def __init__(self, scheduler: Scheduler, max_queue_seconds: float) -> None:
        self._scheduler = scheduler
        self._max_queue_seconds = max_queue_seconds

    def check_queue(self) -> None:
        """Check the queue before a request is read.

        Raises:
            BusyError: if the queue is too long, with the time until it is short enough.
        """
        self._check(self._scheduler.wait_seconds(in_chunks=False))

    def _check(self, backlog_seconds: float) -> None:
        if backlog_seconds > self._max_queue_seconds:
            raise BusyError(
                f"The documents of other requests take {backlog_seconds:.1f} s, "
                f"but the limit is {self._max_queue_seconds:g} s.",
                "Try again later.",
                backlog_seconds - self._max_queue_seconds,
            )

    def admit(
        self, model: LoadedModel, tokens: Sequence[int], seconds_left: float, earlier: Backlog
    ) -> float:
        """Return the predicted time until the documents of a request are answered.

        Args:
            model: model that classifies them.
            tokens: length of each document.
            seconds_left: time to the client's deadline.
            earlier: queued documents of the same request. The limit of the queue does not count
                them.

        Raises:
            DeadlineError: if the deadline has passed.
            BusyError: if the queue is too long for the server or for the deadline.
            DocumentTooLongError: if the documents by themselves take longer than the deadline.
        """
        if seconds_left <= 0:
            raise DeadlineError
        scheduler = self._scheduler
        in_chunks = any(map(model.classifier.in_chunks, tokens))
        self._check(scheduler.wait_seconds(in_chunks=in_chunks, besides=earlier))
        backlog_seconds = scheduler.wait_seconds(in_chunks=in_chunks)
        own = sum(map(model.costs.single, tokens)) * scheduler.slowdown.value + _OVERHEAD_SECONDS
        predicted = backlog_seconds + own
        if own > seconds_left:
            raise DocumentTooLongError(
                f"{sum(tokens)} tokens take {own:.3g} s, but the deadline is in "
                f"{seconds_left:.3g} s.",
                "Send fewer tokens, or allow more time.",
            )
        if predicted > seconds_left:
            raise BusyError(
                f"The answer would take {predicted:.3g} s, but the deadline is in "
                f"{seconds_left:.3g} s.",
                "Try again later, or allow more time.",
                predicted - seconds_left,
            )
        return predicted
