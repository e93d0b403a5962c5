"""The page of a server with several models: links, and the page of each model."""

import shutil
import signal
from pathlib import Path

import pytest
from bundle_swaps import digest
from clients import eventually, http
from page_driver import classify
from playwright.sync_api import Page, expect
from servers import Serve, serving

from aftserve.api.api_keys import make_key

NAME = "b & é?"
"""A name with characters that an address quotes."""


@pytest.fixture(scope="module")
def folder(
    bundle_folder: Path, other_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("bundles")
    shutil.copytree(bundle_folder, folder / "a.bundle")
    shutil.copytree(other_bundle, folder / NAME)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path, serve: Serve) -> str:
    """The address of a server whose folder has no default model."""
    return serve(folder)


def test_page_without_default_links_models(address: str, folder: Path, page: Page) -> None:
    page.goto(address)
    expect(page.locator("#model-links a")).to_have_text(["a", NAME])
    expect(page.locator("#form")).to_be_hidden()
    page.get_by_role("link", name=NAME).click()
    expect(page.locator("#about")).to_be_visible()
    expect(page.locator("#models")).to_be_hidden()
    assert classify(page, "An invoice.")["bundle"] == digest(folder / NAME)
    expect(page.locator("#answered-by")).to_have_text(digest(folder / NAME))
    page.get_by_role("link", name="All models").click()
    expect(page.locator("#model-links a")).to_have_text(["a", NAME])


def test_page_of_default_links_others(folder: Path, tmp_path: Path, page: Page) -> None:
    """With API keys, the links come with the key."""
    key, section = make_key("alice", None)
    (tmp_path / "keys.toml").write_text(section)
    options = (str(folder / NAME), "--api-keys", str(tmp_path / "keys.toml"))
    with serving(folder / "a.bundle", tmp_path / "log", *options) as (address, _):
        page.goto(address)
        expect(page.locator("#key-field")).to_be_visible()
        expect(page.locator("#models")).to_be_hidden()
        page.fill("#key", key)
        page.press("#key", "Tab")
        expect(page.locator("#model-links a")).to_have_text(["a", NAME])
        assert classify(page, "An invoice.")["bundle"] == digest(folder / "a.bundle")


def test_page_without_models_tells_so(tmp_path: Path, bundle_folder: Path, page: Page) -> None:
    """The folder of the only model goes away, and the server unloads the model."""
    bundle = Path(shutil.copytree(bundle_folder, tmp_path / "bundles" / "a.bundle"))
    with serving(bundle.parent, tmp_path / "log") as (address, process):
        shutil.rmtree(bundle)
        process.send_signal(signal.SIGHUP)
        eventually(lambda: http.get(f"{address}/readyz").status_code == 503, "a is unloaded")
        page.goto(address)
        expect(page.locator("#model")).to_contain_text("the server has no model")
        expect(page.locator("#models")).to_be_hidden()
        expect(page.locator("#form")).to_be_hidden()
