"""Loads of models in this process, from folders that change."""

import asyncio
import shutil
from pathlib import Path

import pytest
from bundle_swaps import damage, digest, load_models, names, reason, states

from aftserve.errors import NotFoundError
from aftserve.model.reload import ReloadError


def test_load_finds_new_bundle(folder: Path, bundle_folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
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

    asyncio.run(scenario())


def test_failed_load_leaves_reason(folder: Path, bundle_folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
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

    asyncio.run(scenario())


@pytest.mark.slow
def test_second_bundle_of_name_waits(folder: Path, other_bundle: Path, bundle_folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            for name in ("a", "c", "c.bundle"):
                shutil.copytree(other_bundle, folder / name)
            await models.rescan()
            assert names(models) == ["a", "b"]
            assert models.named("a").active.bundle.digest == digest(bundle_folder)
            with pytest.raises(ReloadError, match="several bundles have its name"):
                await models.load("c")
            shutil.rmtree(folder / "c")
            await models.rescan()
            assert names(models) == ["a", "b", "c"]

    asyncio.run(scenario())


def test_unreadable_folder_hides_only_its_models(
    folder: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundle_folder, other / "c")
    shutil.copytree(bundle_folder, other / "d")

    async def scenario() -> None:
        models = load_models(folder, str(other))
        async with models.running():
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

    asyncio.run(scenario())


def test_unreadable_subfolder_is_skipped(
    folder: Path, bundle_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = folder / "lost+found"
    loop.symlink_to(loop)  # unreadable for root too

    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_load_follows_renamed_bundle(folder: Path, other_bundle: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
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

    asyncio.run(scenario())


def test_load_sees_end_of_clash(folder: Path, bundle_folder: Path) -> None:
    async def scenario() -> None:
        models = load_models(folder)
        async with models.running():
            for name in ("c", "c.bundle"):
                shutil.copytree(bundle_folder, folder / name)
            assert await reason(models, "c") == "several bundles have its name"
            with pytest.raises(ReloadError, match="several bundles have its name"):
                await models.load("c")
            shutil.rmtree(folder / "c")
            assert await reason(models, "c") == "not loaded"
            await models.load("c")
            assert names(models) == ["a", "b", "c"]

    asyncio.run(scenario())
