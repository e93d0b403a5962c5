"""Chromium and a page in it."""

import shutil
from collections.abc import Iterator

import pytest
from page_driver import DESK
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

_MILLISECONDS = 60_000
"""Time for an action or an expectation: other tests share the machine."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Yield a running Chromium, or skip the tests where none is installed."""
    if not CHROMIUM:
        pytest.skip("no Chromium is installed")
    expect.set_options(timeout=_MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": DESK, "height": 900}) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """Yield a page; check that its requests stay on its origin and that its console is empty."""
    page, urls, messages = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: urls.append(request.url))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("console", lambda message: messages.append(message.text))
    page.set_default_timeout(_MILLISECONDS)
    yield page
    origin = page.evaluate("origin")
    assert urls
    assert [url for url in urls if not url.startswith((f"{origin}/", "data:"))] == []
    # The browser also logs refusals of the server, which are not faults of the page.
    assert [m for m in messages if not m.startswith("Failed to load resource")] == []
