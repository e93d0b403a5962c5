"""Whether a request is accepted: in seconds of work, not in requests."""

from collections.abc import Sequence

from aftserve.errors import BusyError, DeadlineError, DocumentTooLongError
from aftserve.model.load import LoadedModel
from aftserve.scheduling.job import Backlog
from aftserve.scheduling.scheduler import Scheduler

_OVERHEAD_SECONDS = 0.005
"""What a request takes outside the engine, and what the system's clock may add to it."""


class Admission:
    """Accepts a request only where it can be answered in time.

    Args:
        scheduler: whose queue it would join.
        max_queue_seconds: most predicted time of what came before.
    """

    def __init__(self, scheduler: Scheduler, max_queue_seconds: float) -> None:
        self._scheduler = scheduler
        self._max_queue_seconds = max_queue_seconds

    def check_queue(self) -> None:
        """Refuses at once, before a request is read, where the queue is too long already.

        Raises:
            BusyError: with the seconds after which it will not be.
        """
        backlog = self._scheduler.wait_seconds(in_chunks=False)
        self._check(backlog)

    def _check(self, backlog: float) -> None:
        if backlog > self._max_queue_seconds:
            raise BusyError(
                f"The documents of other requests take {backlog:.1f} s, "
                f"the most is {self._max_queue_seconds:g} s.",
                "Ask again later.",
                backlog - self._max_queue_seconds,
            )

    def admit(
        self, model: LoadedModel, tokens: Sequence[int], seconds_left: float, earlier: Backlog
    ) -> float:
        """Predicts how long documents of so many tokens take from now until they are answered.

        Args:
            model: that classifies them.
            tokens: of each document.
            seconds_left: to the client's deadline.
            earlier: documents of the same request, which may wait for each other as long as
                the deadline lets them.

        Raises:
            DeadlineError: where it has passed.
            BusyError: where the queue is too long, at all or for the deadline.
            DocumentTooLongError: where the documents alone take longer than the deadline.
        """
        if seconds_left <= 0:
            raise DeadlineError
        scheduler = self._scheduler
        in_chunks = any(map(model.classifier.in_chunks, tokens))
        self._check(scheduler.wait_seconds(in_chunks=in_chunks, besides=earlier))
        backlog = scheduler.wait_seconds(in_chunks=in_chunks)
        own = sum(map(model.costs.alone, tokens)) * scheduler.pace.value + _OVERHEAD_SECONDS
        predicted = backlog + own
        if own > seconds_left:
            raise DocumentTooLongError(
                f"{sum(tokens)} tokens take {own:.3g} s, the deadline is in {seconds_left:.3g} s.",
                "Send less, or give it more time.",
            )
        if predicted > seconds_left:
            raise BusyError(
                f"The answer would take {predicted:.3g} s, the deadline is in "
                f"{seconds_left:.3g} s.",
                "Ask again later, or give it more time.",
                predicted - seconds_left,
            )
        return predicted
