"""The fields of extra inputs on the page."""

import re
from pathlib import Path

import pytest
from page_driver import check_accessibility
from playwright.sync_api import Page, expect
from servers import Serve

VALUES = {"static": "0.5, -1 2e0 3", "region": "4", "flags": "0 2", "token_type_ids": "0 1 5"}


@pytest.fixture
def shown(page: Page, extra_server: str) -> Page:
    """Open the page, and fill all its fields."""
    page.goto(extra_server)
    page.fill("#text", "abc")
    for name, value in VALUES.items():
        page.fill(f"#input-{name}", value)
    return page


def test_fields_are_sent(shown: Page) -> None:
    with shown.expect_request("**/infer*") as sent:
        shown.click("#send")
    assert sent.value.post_data_json == {
        "text": "abc",
        "inputs": {
            "static": [0.5, -1, 2, 3],
            "region": 4,
            "flags": [0, 2],
            "token_type_ids": [0, 1, 5],
        },
    }
    expect(shown.locator("#label")).to_have_text(re.compile("invoice|contract|letter"))
    expect(shown.locator("#input-region")).to_have_value("4")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("static", "1 2 3", "Expected 4 numbers, separated by spaces."),
        ("static", "1 2 3 x", "Expected 4 numbers, separated by spaces."),
        ("region", "5", "Expected one integer from 0 to 4."),
        ("region", "1.5", "Expected one integer from 0 to 4."),
        ("flags", "0 -1", "Expected 2 integers from 0 to 2, separated by spaces."),
        ("token_type_ids", "0 6", "Expected one integer from 0 to 5 for each token"),
    ],
)
def test_bad_values_are_not_sent(shown: Page, name: str, value: str, said: str) -> None:
    requests: list[str] = []
    shown.on("request", lambda request: requests.append(request.url))
    shown.fill(f"#input-{name}", value)
    shown.click("#send")
    message = shown.locator(f"#input-{name}").evaluate("field => field.validationMessage")
    assert said in message
    assert not any("/infer" in url for url in requests)
    shown.fill(f"#input-{name}", VALUES[name])
    with shown.expect_response("**/infer*") as response:
        shown.click("#send")
    assert response.value.status in (200, 422)  # 422: the page asks again without evidence


def test_server_counts_tokens(shown: Page) -> None:
    shown.fill("#input-token_type_ids", "0 1")
    shown.click("#send")
    expect(shown.locator("#problem")).to_contain_text("expected a list of 3 numbers, got a list")


def test_fields_are_accessible(shown: Page) -> None:
    check_accessibility(shown, part="#form")
    expect(shown.get_by_label("static")).to_be_visible()


def test_other_models_have_no_fields(page: Page, server: str) -> None:
    page.goto(server)
    expect(page.locator("#about")).to_be_visible()
    expect(page.locator("#inputs")).to_be_hidden()


def test_second_text_is_sent(page: Page, pair_bundle: Path, serve: Serve) -> None:
    """A model of pairs has a field for the second text, and none for the types of tokens."""
    page.goto(serve(pair_bundle))
    page.fill("#text", "Ada")
    page.fill("#input-text_pair", "Grace")
    assert page.locator("#inputs input").count() == 0
    with page.expect_request("**/infer*") as sent:
        page.click("#send")
    assert sent.value.post_data_json == {"text": "Ada", "text_pair": "Grace"}
    expect(page.locator("#answer")).to_be_visible()
