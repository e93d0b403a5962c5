"""Reload of a service in this process: accepted documents, and refusals."""

import asyncio
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundle_swaps import LENGTHS, deploy, digest, documents, expected_scores, load_models

from aftserve.errors import UnavailableError
from aftserve.model import reload
from aftserve.model.classifier import Classifier
from aftserve.model.reload import ReloadError


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable the garbage collector: reference counts must release an old bundle."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_accepted_documents_keep_old_bundle(
    served_folder: Path, bundle_folder: Path, other_bundle: Path, no_collection: None
) -> None:
    """The old bundle answers documents that it accepted, and is then released."""
    expected = expected_scores(bundle_folder)

    async def scenario() -> None:
        models = load_models(served_folder)
        (service,) = models.loaded()
        old: weakref.ref[Classifier] = weakref.ref(service.model.classifier)
        async with models.running():
            deadline = time.monotonic() + 60
            deploy(other_bundle, served_folder)
            with service.scheduler.paused(service.active):
                accepted = asyncio.create_task(service.classify(documents(), deadline))
                while service.scheduler.waiting_documents < len(LENGTHS):
                    await asyncio.sleep(0.01)
                await service.reloader.run()
                assert service.active.bundle.digest == digest(other_bundle)
                with service.scheduler.paused(service.active):
                    later = asyncio.create_task(service.classify(documents(), deadline))
                    while service.scheduler.waiting_documents < 2 * len(LENGTHS):
                        await asyncio.sleep(0.01)
                    assert old() is not None
            for answer, ids in zip(await accepted, documents(), strict=True):
                result = answer.result
                assert result.bundle == digest(bundle_folder)
                np.testing.assert_allclose(
                    list(result.scores.values()), expected[tuple(ids)], atol=1e-5
                )
            assert {one.result.bundle for one in await later} == {digest(other_bundle)}
            del accepted, later, answer, result
            for _ in range(100):
                if old() is None:
                    break
                await asyncio.sleep(0.05)
            assert old() is None

    asyncio.run(scenario())


def test_fallback_loads_in_turn(served_folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(served_folder, "--on-breach", "fallback")
        (service,) = models.loaded()
        async with models.running():
            async with models.shared.loader.turn:
                service._handle_breach(service.active, "a document differs")
                for _ in range(100):
                    await asyncio.sleep(0.01)
                assert not service.model.uses_standard_ops_only
            while not service.model.uses_standard_ops_only:
                await asyncio.sleep(0.01)
            await service.classify(documents(), time.monotonic() + 60)

    asyncio.run(scenario())


def test_reload_does_not_wait_for_fallback(served_folder: Path) -> None:
    """Accepted documents of the old bundle wait for its fallback, which has a later turn."""

    async def scenario() -> None:
        models = load_models(served_folder, "--on-breach", "fallback")
        (service,) = models.loaded()
        before = service.active
        async with models.running():
            async with models.shared.loader.turn:
                reloading = service.reloader.start()
                await asyncio.sleep(0)
                service._handle_breach(before, "a document differs")
                accepted = asyncio.create_task(service.classify(documents(), time.monotonic() + 60))
                while service.scheduler.waiting_documents < len(LENGTHS):
                    await asyncio.sleep(0.01)
            assert (await reloading).problem is None
            assert service.active is not before
            await accepted
            assert before.model.uses_standard_ops_only
            assert not service.model.uses_standard_ops_only
            assert service.health.ready

    asyncio.run(scenario())


def test_chunked_document_keeps_old_bundle(
    served_folder: Path, bundle_folder: Path, other_bundle: Path
) -> None:
    ids = np.random.default_rng(1).integers(0, 250, 30_000)

    async def scenario() -> None:
        models = load_models(served_folder, "--memory-budget-mib", "1")
        (service,) = models.loaded()
        assert service.model.classifier.in_chunks(len(ids))
        expected = service.model.classifier.chunked.run(ids)["logits"]  # type: ignore[union-attr]
        weights = np.exp(expected[0] - expected[0].max())
        async with models.running():
            deadline = time.monotonic() + 60
            deploy(other_bundle, served_folder)
            with service.scheduler.paused(service.active):
                accepted = asyncio.create_task(service.classify([ids], deadline))
                await asyncio.sleep(0)
                await service.reloader.run()
            (answer,) = await accepted
        result = answer.result
        assert result.bundle == digest(bundle_folder)
        np.testing.assert_allclose(list(result.scores.values()), weights / weights.sum(), atol=1e-5)

    asyncio.run(scenario())


def test_stopped_service_refuses_reload(served_folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(served_folder)
        (service,) = models.loaded()
        async with models.running():
            service.reloader.close()
            with pytest.raises(UnavailableError):
                await service.reloader.run()

    asyncio.run(scenario())


def test_reload_refuses_changed_bundle(
    served_folder: Path, other_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = reload.load_model

    def load_and_replace(*given: object) -> object:
        model = loading(*given)  # type: ignore[arg-type]
        deploy(other_bundle, served_folder)
        return model

    async def scenario() -> None:
        models = load_models(served_folder)
        (service,) = models.loaded()
        async with models.running():
            before = service.active
            with pytest.raises(ReloadError, match="changed while it was read"):
                await service.reloader.run()
            assert service.active is before

    monkeypatch.setattr(reload, "load_model", load_and_replace)
    asyncio.run(scenario())
