"""The thread that runs the engine."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aftexport.engines import RunStoppedError, Stop
from aftexport.errors import EngineError
from aftserve.scheduling.batching import Run
from aftserve.scheduling.engine_thread import EngineThread


class FailingMeasurement:
    """A measurement whose step fails after another error."""

    def __init__(self, error: Exception) -> None:
        self._error: Exception | None = error

    def step(self, stop: Stop) -> None:
        error, self._error = self._error, None
        assert error is not None
        try:
            raise ValueError("the first error")
        except ValueError:
            raise error from None


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "kind", [RunStoppedError, lambda: EngineError("no memory", "Use less."), RuntimeError]
)
async def test_failed_run_is_freed_at_once(kind: Any, no_collection: None) -> None:
    """Without this, an unloaded model keeps its memory until the next full garbage collection."""
    model: Any = SimpleNamespace(measurement=FailingMeasurement(kind()))
    future = asyncio.get_running_loop().create_future()
    runs = [Run((), model, 0.0, 0.0, future, measures=True)]
    left, over = weakref.ref(runs[0]), asyncio.Event()
    del model, future
    EngineThread(lambda: runs.pop() if runs else None, lambda run: None, over.set)
    await asyncio.wait_for(over.wait(), 60)
    assert left() is None
