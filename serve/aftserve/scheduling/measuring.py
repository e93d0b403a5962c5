"""The turns of measurements on the engine: between documents, and a small share beside them."""

import asyncio
import time
from collections.abc import Callable, Container

from aftserve.model.answers import Answer
from aftserve.model.load import LoadedModel
from aftserve.scheduling.batching import Run

_SHARE = 0.1
"""Maximum share of the engine's time for measurements while documents wait."""


class MeasurementTurns:
    """The measurements of the models' costs while the server answers documents.

    Without documents in the queue, a measurement runs at once, and a document that arrives stops
    it. A server whose gaps between documents are short would never measure anything, and then never
    run batches. A measurement is therefore due once all of them take at most a tenth of the time.
    It then runs even if documents wait, and a document that arrives does not stop it.

    Only complete runs count against the tenth. Otherwise stopped runs in short gaps would use it
    up, and no measurement would ever be due. The stopped runs end with the measurements, which take
    at most ten times the predicted time of all complete ones.

    The tenth belongs to all models together, which take turns: after each run, the next model
    measures. While documents wait, the first model whose measurement is due has its turn, so that
    a long measurement delays only itself. The tenth includes the releases of another model's memory
    before measurements that are due.

    Args:
        clock: function that returns the current time; ``time.monotonic`` outside tests.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        # Replaced as a whole, because the event loop reads it while the engine's thread changes it.
        self._models: tuple[LoadedModel, ...] = ()
        self._clock = clock
        self._since = clock()
        self._spent = 0.0
        self._seconds_before = 0.0
        self._release_seconds = 0.0

    def __contains__(self, model: LoadedModel) -> bool:
        """Whether the model has turns, or its measurement is done."""
        return model in self._models

    def add(self, model: LoadedModel) -> None:
        """Give turns to a model."""
        if self.next() is None:  # the time without measurements must not count for later ones
            self._since, self._spent = self._clock(), 0.0
        self._models = (*self._models, model)

    def forget(self, model: LoadedModel) -> None:
        """Give no further turns to a model."""
        self._models = tuple(one for one in self._models if one is not model)

    def next(self, held: Container[LoadedModel] = ()) -> LoadedModel | None:
        """Return the first model that is due, or else the first; None without measurements."""
        left = [one for one in self._models if not one.measurement.is_done and one not in held]
        return next(filter(self.is_due, left), left[0] if left else None)

    def is_due(self, model: LoadedModel, release_seconds: float = 0.0) -> bool:
        """Return whether the model's next measurement may run although documents wait."""
        return self._allowed(0.0) >= model.measurement.next_seconds + release_seconds

    def delay(self, seconds: float) -> float:
        """Return the maximum time that measurements take from the next ``seconds`` of documents."""
        allowed = self._allowed(seconds)
        left = [one.measurement for one in self._models if not one.measurement.is_done]
        return allowed if any(one.next_seconds <= allowed for one in left) else 0.0

    def add_release(self, seconds: float) -> None:
        """Count a release of memory for a measurement that is due, once that measurement ends."""
        self._release_seconds += seconds

    def make_run(
        self,
        model: LoadedModel,
        create_future: "Callable[[], asyncio.Future[list[Answer] | None]]",
    ) -> Run:
        """Return a run of the model's next measurement."""
        self._seconds_before = model.measurement.seconds
        seconds = model.measurement.next_seconds
        return Run((), model, 0.0, seconds, create_future(), measures=True)

    def end_run(self, model: LoadedModel) -> None:
        """End the run of a measurement, also of one that was stopped; the next model follows."""
        if taken := model.measurement.seconds - self._seconds_before:
            self._spent += taken + self._release_seconds
            self._release_seconds = 0.0
        if model in self:
            self.forget(model)
            self._models = (*self._models, model)

    def _allowed(self, later: float) -> float:
        """Return the unused time of the share, ``later`` seconds from now."""
        return _SHARE * (self._clock() + later - self._since) - self._spent
