"""The models of a server in this process, and their states."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bundle_swaps import LENGTHS, documents, load_models

from aftserve.model.documents import DocumentAnswer
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service


@asynccontextmanager
async def running_models(place: Path, *options: str) -> AsyncIterator[ModelRepository]:
    """Load bundles, and answer requests within the block."""
    models = load_models(place, *options)
    async with models.running():
        yield models


@asynccontextmanager
async def running_service(
    bundle: Path, *options: str, measured: bool = False
) -> AsyncIterator[Service]:
    """Load a bundle, and answer requests within the block, if wanted with measured costs."""
    models = load_models(bundle, *options)
    (service,) = models.loaded()
    if measured:
        service.model.measurement.measure_all()
    async with models.running():
        yield service


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, for half a minute at most."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("never happened")


async def accept(service: Service) -> "asyncio.Task[list[DocumentAnswer]]":
    """Send the documents of ``bundle_swaps``, and return their answers once they wait."""
    asking = asyncio.create_task(service.classify(documents(), time.monotonic() + 60))
    await until(lambda: service.scheduler.waiting_documents >= len(LENGTHS))
    return asking


async def states(models: ModelRepository) -> dict[str, str]:
    return {one.name: one.state for one in await models.index()}


async def reason(models: ModelRepository, name: str) -> str:
    """Return the reason why a model is not ready."""
    (state,) = [one for one in await models.index() if one.name == name]
    assert state.state == "UNAVAILABLE"
    return state.reason


def names(models: ModelRepository) -> list[str]:
    return [service.name for service in models.loaded()]
