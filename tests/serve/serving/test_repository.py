"""Loads of models in this process, from folders that change."""

import asyncio
import gc
import shutil
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from bundle_swaps import (
    accept,
    damage,
    digest,
    documents,
    expected_scores,
    load_models,
    names,
    reason,
    running_models,
    states,
    until,
)

from aftserve.errors import NotFoundError, UnavailableError
from aftserve.model.reload import ReloadError


async def test_load_finds_new_bundle(folder: Path, bundle_folder: Path) -> None:
    async with running_models(folder) as models:
        with pytest.raises(NotFoundError, match="the name of a bundle, 'a' or 'b', got 'c'"):
            await models.load("c")
        with pytest.raises(NotFoundError, match=r"got '\.\./bundles/a'"):
            await models.load("../bundles/a")
        with pytest.raises(NotFoundError):
            await models.unload("c")
        shutil.copytree(bundle_folder, folder / "c.bundle")
        assert (await states(models))["c"] == "UNAVAILABLE"
        await models.load("c")
        assert (await states(models))["c"] == "READY"


async def test_failed_load_leaves_reason(folder: Path, bundle_folder: Path) -> None:
    async with running_models(folder) as models:
        damage(Path(shutil.copytree(bundle_folder, folder / "c")))
        with pytest.raises(ReloadError, match=r"model\.onnx was changed"):
            await models.load("c")
        shown = await reason(models, "c")
        assert "model.onnx was changed" in shown
        assert str(folder) not in shown
        damage(folder / "a.bundle")
        await models.rescan()
        assert (await states(models))["a"] == "READY"  # the bundle before answers
        assert "model.onnx was changed" in str(models.named("a").reloader.last)


async def test_second_bundle_of_name_waits(
    folder: Path, other_bundle: Path, bundle_folder: Path
) -> None:
    async with running_models(folder) as models:
        for name in ("a", "c", "c.bundle"):
            shutil.copytree(other_bundle, folder / name)
        await models.rescan()
        assert names(models) == ["a", "b"]
        assert models.named("a").active.bundle.digest == digest(bundle_folder)
        assert await reason(models, "c") == "several bundles have its name"
        with pytest.raises(ReloadError, match="several bundles have its name"):
            await models.load("c")
        shutil.rmtree(folder / "c")
        assert await reason(models, "c") == "not loaded"
        await models.load("c")
        assert names(models) == ["a", "b", "c"]


@pytest.mark.slow
async def test_unreadable_folder_hides_only_its_models(
    folder: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundle_folder, other / "c")
    shutil.copytree(bundle_folder, other / "d")
    async with running_models(folder, str(other)) as models:
        folder.rename(folder.with_name("moved"))
        shutil.rmtree(other / "c")
        (other / "d").rename(other / "e")
        await models.rescan()
        assert names(models) == ["a", "b", "e"]
        for name in ("a", "unknown"):
            with pytest.raises(ReloadError, match="the folder 'bundles' cannot be read") as got:
                await models.load(name)
            assert str(tmp_path) not in str(got.value)
        await models.load("e")
        assert set((await states(models)).values()) == {"READY"}


async def test_unreadable_subfolder_is_skipped(
    folder: Path, bundle_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = folder / "lost+found"
    loop.symlink_to(loop)  # unreadable for root too
    models = load_models(folder)
    assert "lost+found': the folder cannot be read" in caplog.text
    async with models.running():
        caplog.clear()
        assert await states(models) == {"a": "READY", "b": "READY"}
        assert not caplog.records
        shutil.copytree(bundle_folder, folder / "c")
        await models.rescan()
        assert "lost+found': the folder cannot be read" in caplog.text
        assert names(models) == ["a", "b", "c"]
        with pytest.raises(ReloadError, match=r"the folder 'lost\+found' cannot be read"):
            await models.load("lost+found")
        with pytest.raises(NotFoundError, match="'a' or 'b' or 'c', got 'd'"):
            await models.load("d")


@pytest.mark.slow
async def test_load_follows_renamed_bundle(folder: Path, other_bundle: Path) -> None:
    async with running_models(folder) as models:
        shutil.rmtree(folder / "a.bundle")
        shutil.copytree(other_bundle, folder / "a")
        assert (await models.load("a")).bundle == digest(other_bundle)
        await models.unload("a")
        (folder / "a").rename(folder / "a.bundle")
        await models.load("a")
        shutil.rmtree(folder / "a.bundle")
        with pytest.raises(ReloadError, match=r"^a\.bundle: no such folder"):
            await models.load("a")
        assert names(models) == ["a", "b"]  # the bundle before answers
        await models.unload("a")
        with pytest.raises(NotFoundError, match="the name of a bundle, 'b', got 'a'"):
            await models.load("a")


async def test_unload_answers_accepted_requests(folder: Path, other_bundle: Path) -> None:
    expected = expected_scores(other_bundle)
    async with running_models(folder) as models:
        service = models.named("b")
        with models.shared.scheduler.paused(service.active):
            accepted = await accept(service)
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


async def test_unload_answers_requests_of_bundle_before(folder: Path, other_bundle: Path) -> None:
    """A second unload waits for them too."""
    async with running_models(folder) as models:
        service = models.named("b")
        with models.shared.scheduler.paused(service.active):
            accepted = await accept(service)
            await models.load("b")
            unloads = [asyncio.create_task(models.unload("b")) for _ in range(2)]
            for _ in range(20):
                await asyncio.sleep(0.01)
            assert (await states(models))["b"] == "UNLOADING"
            assert not any(unload.done() for unload in unloads)
        await asyncio.gather(*unloads)
        assert {one.result.bundle for one in await accepted} == {digest(other_bundle)}
        assert b'model="b"' not in models.shared.metrics.exposition()[0]


async def test_unload_does_not_wait_for_other_load(folder: Path) -> None:
    async with running_models(folder) as models:
        async with models.shared.loader.turn:
            loading = asyncio.create_task(models.load("a"))
            unloading = asyncio.create_task(models.unload("b"))
            await until(unloading.done)
            assert not loading.done()
        await loading
        assert await states(models) == {"a": "READY", "b": "UNAVAILABLE"}


@pytest.mark.slow
async def test_unload_frees_memory_of_late_fallback(folder: Path) -> None:
    """The breach of one of the last requests begins the fallback."""
    async with running_models(folder, "--on-breach", "fallback") as models:
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
        await until(lambda: classifier() is None)


async def test_unload_frees_memory_and_metrics(folder: Path) -> None:
    async with running_models(folder) as models:
        service = models.named("b")
        await service.classify(documents(), time.monotonic() + 60)
        classifier = weakref.ref(service.model.classifier)
        assert b'model="b"' in models.shared.metrics.exposition()[0]
        del service
        await models.unload("b")
        assert b'model="b"' not in models.shared.metrics.exposition()[0]
        assert b'model="a"' in models.shared.metrics.exposition()[0]
        # the engine's thread may still stop a measurement
        await until(lambda: classifier() is None)


@pytest.mark.slow
async def test_unloaded_model_returns_by_load_only(folder: Path, other_bundle: Path) -> None:
    async with running_models(folder) as models:
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


async def test_stop_refuses_unload(folder: Path) -> None:
    async with running_models(folder) as models:
        models.stop_loads()
        with pytest.raises(UnavailableError, match="The server is stopping"):
            await models.unload("a")
        assert names(models) == ["a", "b"]
