"""Admission of requests, by seconds of work rather than by number."""

import math
import time
from collections.abc import Sequence
from functools import partial

from aftserve.errors import BusyError, DeadlineError, DocumentTooLongError
from aftserve.http.clients import Client
from aftserve.model.load import LoadedModel
from aftserve.scheduling.batching import Backlog
from aftserve.scheduling.scheduler import Scheduler

_OVERHEAD_SECONDS = 0.005
"""Time of a request outside the engine, and the clock's resolution."""
_MEASUREMENT_SECONDS = 5.0
"""Time after which a client may ask again about a document of unknown cost."""


class Admission:
    """The admission of requests that can be answered in time.

    The documents before a request are those of its own client, and of each other client its share
    of the engine until then. So a client whose documents fill the queue is refused, and others are
    admitted. A long run of another client counts for the deadline, but not for the queue's limit:
    a client that is refused for it might never find another moment.

    Documents of other clients that arrive later may delay an accepted document by their shares.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        max_queue_seconds: float,  # predicted time of the documents before a request
    ) -> None:
        self._scheduler = scheduler
        self._max_queue_seconds = max_queue_seconds

    def check_queue(self, client: Client) -> None:
        """Check the queue before a request of a client is read.

        Raises:
            BusyError: if the queue is too long, with the time until it is short enough.
        """
        predictions = self._scheduler.predictions
        self._check(
            predictions.wait_seconds(
                in_chunks=False, client=client.name, seconds=0.0, counts_run=False
            )
        )

    def _check(self, backlog_seconds: float) -> None:
        if backlog_seconds > self._max_queue_seconds:
            raise BusyError(
                f"The documents of other requests take {backlog_seconds:.1f} s, "
                f"but the limit is {self._max_queue_seconds:g} s.",
                "Try again later.",
                backlog_seconds - self._max_queue_seconds,
            )

    async def admit(
        self,
        model: LoadedModel,
        tokens: Sequence[int],  # of each document
        deadline: float,  # by time.monotonic()
        earlier: Backlog,  # of the same request, which the queue's limit does not count
        client: Client,
    ) -> float:
        """Return the predicted time until the documents of a request are answered.

        The first estimates of a model are too slow. Documents that by them take longer than the
        deadline wait for better ones, and are refused as too long only by complete measurements.
        If no better estimates are to come, because the model was replaced or its runs failed, the
        documents are admitted, and only their deadline limits their time.

        Raises:
            DeadlineError: if the deadline has passed.
            BusyError: if the queue is too long for the server or for the deadline, the costs of
                long documents are not measured before the deadline, or the client has used up its
                tokens or seconds.
            UnavailableError: if the scheduler ends.
            DocumentTooLongError: if the documents by themselves take longer than the deadline.
        """
        while True:
            # Read the state before the estimate: the engine's thread may improve both meanwhile.
            is_complete = model.measurement.is_complete
            is_measuring = self._scheduler.is_measuring(model)
            seconds_left = deadline - time.monotonic()
            own = self._own_seconds(model, tokens)
            if seconds_left <= 0:
                raise DeadlineError
            if own > seconds_left and is_complete:
                raise DocumentTooLongError(
                    f"{sum(tokens)} tokens take {own:.3g} s, but the deadline is in "
                    f"{seconds_left:.3g} s.",
                    "Send fewer tokens, or allow more time.",
                )
            if own <= seconds_left or not is_measuring:
                seconds = self._admit(model, tokens, own, seconds_left, earlier, client.name)
                client.spend(sum(tokens), own)
                return seconds
            if not await self._scheduler.wait_for_measurement(seconds_left):
                raise BusyError(
                    f"The time of {sum(tokens)} tokens is not measured yet, and the deadline comes "
                    f"before the first estimate of {own:.3g} s.",
                    "Try again later, or allow more time.",
                    _MEASUREMENT_SECONDS,
                )

    def _own_seconds(self, model: LoadedModel, tokens: Sequence[int]) -> float:
        seconds = sum(map(model.measurement.costs.single, tokens)) * model.slowdown.value
        return seconds + _OVERHEAD_SECONDS

    def _admit(
        self,
        model: LoadedModel,
        tokens: Sequence[int],
        own: float,
        seconds_left: float,
        earlier: Backlog,
        client: str,
    ) -> float:
        predictions = self._scheduler.predictions
        in_chunks = any(map(model.classifier.in_chunks, tokens))

        wait_seconds = partial(
            predictions.wait_seconds, in_chunks=in_chunks, client=client, seconds=own
        )
        # Of the others' shares, the limit leaves out as much as the request itself takes. A client
        # with one long document would otherwise never find a moment.
        request = own + earlier.seconds_without(Backlog(), in_chunks=in_chunks)
        mine = wait_seconds(besides=earlier, counts_run=False, seconds=-math.inf)
        others = wait_seconds(besides=earlier, counts_run=False) - mine
        self._check(mine + max(0.0, others - request))
        backlog_seconds = wait_seconds()
        # An estimate over the deadline is a first one, which is too slow, so it does not count.
        needed = backlog_seconds + (own if own <= seconds_left else 0.0)
        if needed > seconds_left:
            raise BusyError(
                f"The answer would take {needed:.3g} s, but the deadline is in "
                f"{seconds_left:.3g} s.",
                "Try again later, or allow more time.",
                needed - seconds_left,
            )
        return backlog_seconds + own
