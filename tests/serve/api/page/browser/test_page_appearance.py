"""The page around the answer: bundle, parity, accessibility and motion."""

from typing import Any

import pytest
from page_driver import (
    DESK,
    GOLDEN,
    ORDINARY,
    PHONE,
    check_accessibility,
    classify,
    fulfill_changed,
)
from playwright.sync_api import Page, expect


def test_page_shows_bundle_and_parity(server: str, page: Page) -> None:
    page.goto(server)
    expect(page.locator("#parity")).to_have_text("Parity with PyTorch: within tolerance")
    info = page.request.get(f"{server}/info").json()
    labels = ", ".join(info["labels"])
    expect(page.locator("#model")).to_have_text(f"model. Distinguishes 3 classes: {labels}.")
    expect(page).to_have_title("model: send a document")
    expect(page.locator("#back")).to_be_hidden()
    golden = page.request.get(f"{server}/parity").json()["golden"]
    expect(page.locator("#bundle")).to_have_text(info["bundle"])
    expect(page.locator("#golden tbody tr")).to_have_count(len(golden))
    expect(page.locator("#golden-note")).to_have_text(GOLDEN)
    answer = classify(page, ORDINARY)
    expect(page.locator("#answered-by")).to_have_text(answer["bundle"])
    assert page.locator("#times dd").count() == 5


def test_lost_parity_and_new_bundle_appear(server: str, page: Page) -> None:
    """The page reads ``GET /info`` again after an answer of another bundle."""
    page.route("**/infer*", lambda route: fulfill_changed(route, bundle="another"))
    page.route("**/parity", lambda route: fulfill_changed(route, within=False))
    page.goto(server)
    expect(page.locator("#parity.hold")).to_have_text("Parity with PyTorch: OUTSIDE tolerance")
    with page.expect_response("**/info"):
        classify(page, ORDINARY)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_page_passes_accessibility_checks(server: str, page: Page, scheme: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(server)
    page.click("#about summary")
    for text, section in ((ORDINARY * 20, "#answer"), ("a" * 6001, "#problem")):
        classify(page, text)
        expect(page.locator(section)).to_be_in_viewport()
        if section == "#answer":
            page.click("#program summary")
        check_accessibility(page, "color-contrast", "label", "scrollable-region-focusable")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize(("motion", "scrolling"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_reduced_motion_disables_animation(
    server: str, page: Page, motion: Any, scrolling: str
) -> None:
    page.emulate_media(reduced_motion=motion)
    page.goto(server)
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == scrolling
    classify(page, ORDINARY)
    assert page.evaluate("document.getAnimations().length") == 0
