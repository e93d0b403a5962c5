"""The paths of bundles that a server is given, and the names of their models."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_swaps import damage, load_models, names, running_models, states

from aftexport.errors import AftexportError, BundleError, UsageError
from aftserve.settings import Settings


def test_default_is_first_bundle_named(folder: Path) -> None:
    first, second = folder / "b.bundle", folder / "a.bundle"
    models = load_models(first, str(second))
    assert models.default is models.named("b")
    assert names(models) == ["a", "b"]


def test_folder_beside_bundle_keeps_default(
    folder: Path, bundle_folder: Path, tmp_path: Path
) -> None:
    single = Path(shutil.copytree(bundle_folder, tmp_path / "single"))
    models = load_models(folder, str(single))
    assert models.default is models.named("single")
    assert names(models) == ["a", "b", "single"]


def test_bundle_named_twice_counts_once(folder: Path) -> None:
    models = load_models(folder, str(folder / "b.bundle"))
    assert names(models) == ["a", "b"]
    assert models.default is models.named("b")


def test_path_that_cannot_be_read_is_a_bundle() -> None:
    """The check of the bundle gives the reason."""
    with pytest.raises(BundleError, match="cannot be read"):
        load_models(Path("x" * 300))


async def test_unusable_name_is_left_out(
    folder: Path, bundle_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_models(folder) as models:
        shutil.copytree(bundle_folder, os.fsdecode(bytes(folder) + b"/x\xff.bundle"))
        assert await states(models) == {"a": "READY", "b": "READY"}
        await models.rescan()
        assert "a name of printable characters, got 'x\\udcff'" in caplog.text
        assert names(models) == ["a", "b"]


def clash(folder: Path) -> list[str]:
    shutil.copytree(folder / "a.bundle", folder / "a")
    return [str(folder)]


def clash_of_words(folder: Path) -> list[str]:
    return [str(folder), str(shutil.copytree(folder / "b.bundle", folder.parent / "b"))]


def empty_folder(folder: Path) -> list[str]:
    (folder.parent / "empty").mkdir()
    return [str(folder.parent / "empty")]


def broken(folder: Path) -> list[str]:
    damage(folder / "b.bundle")
    return [str(folder)]


def unprintable(folder: Path) -> list[str]:
    return [str((folder / "b.bundle").rename(folder / "b\n"))]


def missing_reference(folder: Path) -> list[str]:
    config = folder.parent / "config.toml"
    config.write_text('[models.a]\nreference = "/absent"\n')
    return [str(folder), "--config", str(config)]


def unknown_section(folder: Path) -> list[str]:
    config = folder.parent / "config.toml"
    config.write_text("[models.c]\nshadow = 1\n")
    return [str(folder), "--config", str(config)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (clash, r"one bundle of the name 'a', got .*a and .*a\.bundle"),
        (clash_of_words, r"one bundle of the name 'b', got .*b and .*b\.bundle"),
        (empty_folder, "empty: not a bundle, and the folder has none"),
        (broken, r"b\.bundle: .*model.onnx was changed"),
        (unprintable, "a name of printable characters"),
        (unknown_section, r"\[models\.c\] .* expected the name of a model, a, b"),
        (missing_reference, r"\[models\.a\] reference /absent does not exist"),
        (
            lambda folder: [str(folder / "a.bundle"), "--reference", "/absent"],
            "--reference /absent does not exist",
        ),
        (lambda folder: [str(folder), "--reference", "x"], "--reference belongs to the model of"),
        (
            lambda folder: [
                str(folder / "a.bundle"),
                str(folder / "b.bundle"),
                "--model-name",
                "x",
            ],
            "--model-name names the model of one bundle",
        ),
    ],
    ids=[
        "clash",
        "clash of words",
        "empty",
        "broken",
        "name",
        "section",
        "absent",
        "absent of one",
        "reference",
        "renamed",
    ],
)
def test_start_refuses(words: Callable[[Path], list[str]], message: str, folder: Path) -> None:
    first, *others = words(folder)
    with pytest.raises(AftexportError, match=message):
        load_models(Path(first), *others)


def test_only_bundle_of_several_is_refused() -> None:
    settings = Settings.read(["a", "b"])
    with pytest.raises(UsageError, match="Expected one bundle, got a, b"):
        _ = settings.bundle


def test_folder_in_place_of_bundle_is_refused(folder: Path) -> None:
    settings = Settings.read([str(folder)])
    with pytest.raises(UsageError, match=r"got .*bundles, a folder of bundles\. .*a\.bundle"):
        _ = settings.bundle
