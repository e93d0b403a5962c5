"""The time for which one model goes on before a run of another."""

_RUN_SECONDS = 20.0
"""Seconds of runs for each second of the release before them."""
_LEAST_RUN_SECONDS = 4.0
"""Seconds of runs for each second of the release before a late promise ends the tenure."""
_MAX_SECONDS = 0.5


class Tenure:
    """The time for which documents of one model go before older documents of other models.

    Before a run of another model, the engine releases its memory by a run of its shortest document.
    That takes 0.1 ms for a tiny model, 3 ms for one of 6 layers of width 256, and 30 ms for one of
    12 layers of width 768: little against runs of hundreds of tokens, and more than runs of few.
    While the queue has documents of the same model, these therefore go first until their runs have
    taken 20 times as long as the last release. Half a second is the limit, so that one slow release
    does not delay other models for long. Then the oldest document of the queue goes first.

    The time may also end before another model's document misses its promise, but not before runs
    took four times as long as the release. Otherwise a server whose promises are all late would
    release memory between any two documents, and be later still.
    """

    def __init__(self) -> None:
        self._left = self._least_left = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the oldest document goes first."""
        return self._left <= 0.0

    @property
    def may_end(self) -> bool:
        """Whether a document that would miss its promise may go first."""
        return self._least_left <= 0.0

    def begin(self, release_seconds: float) -> None:
        """Begin after a release of memory that took this time."""
        self._left = min(_RUN_SECONDS * release_seconds, _MAX_SECONDS)
        self._least_left = min(_LEAST_RUN_SECONDS * release_seconds, _MAX_SECONDS)

    def spend(self, seconds: float) -> None:
        """Count the time of a run of documents."""
        self._left -= seconds
        self._least_left -= seconds
