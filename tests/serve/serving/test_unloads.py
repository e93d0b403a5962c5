"""Unloads of models in this process: accepted requests, and memory."""

import asyncio
import gc
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from bundle_swaps import digest, documents, expected_scores, load_models, names, reason, states

from aftserve.errors import NotFoundError, UnavailableError


def test_unload_answers_accepted_requests(folder: Path, other_bundle: Path) -> None:
    expected = expected_scores(other_bundle)

    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            service = models.named("b")
            with models.shared.scheduler.paused(service.active):
                accepted = asyncio.create_task(service.classify(documents(), time.monotonic() + 60))
                while models.shared.scheduler.waiting_documents < len(documents()):
                    await asyncio.sleep(0.01)
                unloading = asyncio.create_task(models.unload("b"))
                while (await states(models))["b"] != "UNLOADING":
                    await asyncio.sleep(0.01)
                with pytest.raises(NotFoundError, match="Expected the model 'a', got 'b'"):
                    models.named("b")
                assert not unloading.done()
            await unloading
            for answer, ids in zip(await accepted, documents(), strict=True):
                scores = list(answer.result.scores.values())
                np.testing.assert_allclose(scores, expected[tuple(ids)], atol=1e-5)
            assert await states(models) == {"a": "READY", "b": "UNAVAILABLE"}

    asyncio.run(scenario())


def test_unload_answers_requests_of_bundle_before(folder: Path, other_bundle: Path) -> None:
    """A second unload waits for them too."""

    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            service = models.named("b")
            with models.shared.scheduler.paused(service.active):
                accepted = asyncio.create_task(service.classify(documents(), time.monotonic() + 60))
                while models.shared.scheduler.waiting_documents < len(documents()):
                    await asyncio.sleep(0.01)
                await models.load("b")
                unloads = [asyncio.create_task(models.unload("b")) for _ in range(2)]
                for _ in range(20):
                    await asyncio.sleep(0.01)
                assert (await states(models))["b"] == "UNLOADING"
                assert not any(unload.done() for unload in unloads)
            await asyncio.gather(*unloads)
            assert {one.result.bundle for one in await accepted} == {digest(other_bundle)}
            assert b'model="b"' not in models.shared.metrics.exposition()[0]

    asyncio.run(scenario())


def test_unload_does_not_wait_for_other_load(folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            async with models.shared.loader.turn:
                loading = asyncio.create_task(models.load("a"))
                unloading = asyncio.create_task(models.unload("b"))
                for _ in range(3000):
                    if unloading.done():
                        break
                    await asyncio.sleep(0.01)
                assert unloading.done()
                assert not loading.done()
            await loading
            assert await states(models) == {"a": "READY", "b": "UNAVAILABLE"}

    asyncio.run(scenario())


def test_unload_frees_memory_of_late_fallback(folder: Path) -> None:
    """The breach of one of the last requests begins the fallback."""

    async def scenario() -> None:
        models = load_models(folder, "--on-breach", "fallback")
        async with models.running():
            service = models.named("b")
            with service.holders.held():
                unloading = asyncio.create_task(models.unload("b"))
                while (await states(models))["b"] != "UNLOADING":
                    await asyncio.sleep(0.01)
                service._handle_breach(service.active, "a document differs")
            await unloading
            assert service.model.uses_standard_ops_only
            classifier = weakref.ref(service.model.classifier)
            del service
            gc.collect()  # that of the unload came before
            for _ in range(1000):
                if classifier() is None:
                    break
                await asyncio.sleep(0.01)
            assert classifier() is None

    asyncio.run(scenario())


def test_unload_frees_memory_and_metrics(folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            service = models.named("b")
            await service.classify(documents(), time.monotonic() + 60)
            classifier = weakref.ref(service.model.classifier)
            assert b'model="b"' in models.shared.metrics.exposition()[0]
            del service
            await models.unload("b")
            assert b'model="b"' not in models.shared.metrics.exposition()[0]
            assert b'model="a"' in models.shared.metrics.exposition()[0]
            for _ in range(1000):
                if classifier() is None:
                    break
                await asyncio.sleep(0.01)  # the engine's thread may still stop a measurement
            assert classifier() is None

    asyncio.run(scenario())


def test_unloaded_model_returns_by_load_only(folder: Path, other_bundle: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            await models.unload("b")
            await models.unload("b")
            await models.rescan()
            assert names(models) == ["a"]
            assert await reason(models, "b") == "unloaded"
            assert (await models.load("b")).bundle == digest(other_bundle)
            assert await states(models) == {"a": "READY", "b": "READY"}
            await models.unload("a")
            await models.unload("b")
            assert (models.ready, models.status) == (False, "not ready: no model is loaded")

    asyncio.run(scenario())


def test_stop_refuses_unload(folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            models.stop_loads()
            with pytest.raises(UnavailableError, match="The server is stopping"):
                await models.unload("a")
            assert names(models) == ["a", "b"]

    asyncio.run(scenario())
