"""Refusals on the page: errors of requests, API keys, rates and missing evidence."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bundles import changed_manifest
from page_driver import GOLDEN, ORDINARY, classify, focused, fulfill_changed
from playwright.sync_api import BrowserContext, Page, expect
from servers import serving

from aftserve.api.api_keys import make_key


@pytest.fixture(scope="module")
def keys() -> dict[str, tuple[str, str]]:
    return {"always": make_key("always", None), "rarely": make_key("rarely", "1/hour")}


@pytest.fixture(scope="module")
def guarded(
    bundle_folder: Path, keys: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Yield the address of a server with API keys and a CORS origin, but without evidence."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.toml").write_text("\n".join(section for _, section in keys.values()))
    bundle = Path(shutil.copytree(bundle_folder, folder / "old.bundle"))
    changed_manifest(bundle, {"evidence_heads": None})
    options = ("--api-keys", str(folder / "keys.toml"), "--cors-origins", "https://other.example")
    with serving(bundle, folder / "log", *options) as (address, _):
        yield address


def test_too_long_document_shows_error(server: str, page: Page) -> None:
    page.goto(server)
    answer = classify(page, "a" * 6001)
    expect(page.locator("#problem h2")).to_have_text("The server answers 413")
    expect(page.locator("#problem p")).to_have_text(answer["detail"])
    expect(page.locator("#answer")).to_be_hidden()
    classify(page, ORDINARY)
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#answer")).to_be_visible()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": 503, "json": {"detail": "It is stopping."}}, "503 It is stopping."),
        ({"status": 502, "body": "<html>"}, "502 Expected an answer in JSON"),
        ({"status": 200, "body": "<html>"}, "200 Expected an answer in JSON"),
        ({"status": 503, "json": {"detail": "<b>"}, "headers": {"Retry-After": "7"}},
         "503 <b> Try again in 7 s."),
        (None, "No answer The server cannot be reached"),
    ],
)  # fmt: skip
def test_failed_request_shows_reason(
    server: str, page: Page, answer: dict[str, Any] | None, reason: str
) -> None:
    page.goto(server)
    page.route("**/infer*", lambda route: route.fulfill(**answer) if answer else route.abort())
    page.fill("#text", ORDINARY)
    page.click("#send")
    expect(page.locator("#problem")).to_contain_text(reason, use_inner_text=True)


def test_stop_button_cancels_request(server: str, page: Page) -> None:
    page.goto(server)
    page.route("**/infer*", lambda route: None)
    page.fill("#text", ORDINARY)
    page.click("#send")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#stop")).to_be_hidden()


def test_page_never_stores_api_key(
    guarded: str, keys: dict[str, tuple[str, str]], context: BrowserContext, page: Page
) -> None:
    page.goto(guarded)
    expect(page.locator("#key-field")).to_be_visible()
    page.keyboard.press("Tab")
    assert focused(page) == "key"
    classify(page, ORDINARY)
    expect(page.locator("#problem h2")).to_have_text("The server answers 401")
    assert focused(page) == "key"
    page.fill("#key", keys["always"][0])
    classify(page, ORDINARY)
    expect(page.locator("#answer")).to_be_visible()
    expect(page.locator("#golden-note")).to_have_text(GOLDEN)
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert context.cookies() == []
    assert keys["always"][0] not in page.url
    page.reload()
    expect(page.locator("#key")).to_have_value("")


def test_exceeded_rate_shows_retry_time(
    guarded: str, keys: dict[str, tuple[str, str]], page: Page
) -> None:
    page.goto(guarded)
    page.fill("#key", keys["rarely"][0])
    page.fill("#passages", "0")
    classify(page, ORDINARY)
    classify(page, ORDINARY)
    expect(page.locator("#problem h2")).to_have_text("The server answers 429")
    reason = re.compile(r"The rate of this API key is 1 per 1 hour\..* Try again in 3,[56]\d\d s\.")
    expect(page.locator("#problem p")).to_have_text(reason)


def test_model_without_evidence_has_no_control(
    guarded: str, keys: dict[str, tuple[str, str]], page: Page
) -> None:
    page.goto(guarded)
    page.fill("#key", keys["always"][0])
    with page.expect_response("**/info"):
        page.press("#key", "Tab")
    expect(page.locator("#passages")).to_be_hidden()
    classify(page, ORDINARY)
    expect(page.locator("#answer")).to_be_visible()
    expect(page.locator("#evidence-title")).to_be_hidden()
    expect(page.locator("#evidence-note")).to_be_hidden()
    expect(page.locator("#command")).to_contain_text('Authorization: Bearer $KEY" --json')


def test_missing_evidence_shows_reason(
    guarded: str, keys: dict[str, tuple[str, str]], page: Page
) -> None:
    """As of a document that is read in windows, for which /info cannot tell."""
    page.route("**/info", lambda route: fulfill_changed(route, evidence=True))
    page.goto(guarded)
    page.fill("#key", keys["always"][0])
    with page.expect_response("**/info"):
        page.press("#key", "Tab")
    classify(page, ORDINARY)
    expect(page.locator("#answer")).to_be_visible()
    note = page.locator("#evidence-note")
    expect(note).to_contain_text(
        "This answer has no evidence. The server says: “This model has no evidence: "
    )
    expect(note).to_contain_text("The page repeated the request without evidence.")
    expect(page.locator("#document")).to_be_hidden()
    page.fill("#passages", "0")
    classify(page, ORDINARY)
    expect(note).to_have_text("This answer has no evidence. It was not requested.")
