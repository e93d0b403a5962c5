"""The predicted times of releases of memory."""

from weakref import WeakKeyDictionary

from aftserve.model.load import LoadedModel


class ReleaseTimes:
    """The time of each model's last release of memory, which predicts its next one."""

    def __init__(self) -> None:
        self._last = WeakKeyDictionary[LoadedModel, float]()

    def observe(self, model: LoadedModel, seconds: float) -> None:
        """Count a release."""
        self._last[model] = seconds

    def predict(self, model: LoadedModel) -> float:
        """Return the predicted seconds of a model's next release.

        Before the first one, the prediction is that of its shortest document, whose run releases
        the memory.
        """
        if (last := self._last.get(model)) is not None:
            return last
        return model.costs.single(model.classifier.min_tokens) * model.slowdown.value
