"""The answers of several heads on the page: spans with a legend, and vectors."""

from collections import Counter
from typing import Any

import pytest
import served_heads
from page_driver import check_accessibility, classify, fulfill_changed
from playwright.sync_api import Page, expect

TEXT = "Zoë met 👩‍🚀 Ada in <b>Turin</b>\n\ton the 3rd of May."


@pytest.fixture
def address(heads_server: str) -> str:
    return heads_server


def test_each_head_is_shown(address: str, page: Page) -> None:
    page.goto(address)
    topics, answers, flags, tags = (
        ", ".join(names)
        for names in (
            served_heads.TOPICS,
            served_heads.ANSWERS,
            served_heads.FLAGS,
            served_heads.TAGS,
        )
    )
    expect(page.locator("#model")).to_have_text(
        f"heads. Distinguishes 3 classes: {topics}. Distinguishes 2 classes: {answers}. "
        f"Finds which hold of 2 labels: {flags}. Estimates years. "
        f"Labels every token with one of 5 labels: {tags}. "
        "Returns a vector of 4 numbers for every token. "
        "Returns a vector of 6 numbers for every document."
    )
    heads = classify(page, TEXT)["heads"]
    assert list(heads) == [*served_heads.WIDTHS]
    expect(page.locator("#label .head-name")).to_have_text([*heads])
    expect(page.locator("#label")).to_contain_text(heads["topic"]["label"])
    expect(page.locator("#scores tbody th.head-name")).to_have_text(
        ["topic", "paid", "flags", "age"]
    )
    expect(page.locator("#scores tbody td.number")).to_have_count(8)
    titles = ["Spans of tags", "Vectors of vectors", "Vectors of embedding"]
    expect(page.locator("#tokens h3")).to_have_text(titles)
    shown = page.locator("#tokens code").all_text_contents()
    wanted = [heads["vectors"]["vectors"][0], heads["embedding"]["vector"]]
    for numbers, vector in zip(shown, wanted, strict=True):
        assert [float(x) for x in numbers.split(", ")] == pytest.approx(vector, rel=1e-3)


def test_spans_are_marked_with_legend(address: str, page: Page) -> None:
    page.goto(address)
    spans = classify(page, TEXT)["heads"]["tags"]["spans"]
    assert {span["label"] for span in spans} == {"name", "date"}
    characters = "".join(span["text"] for span in spans)
    assert any(ord(character) > 0xFFFF for character in characters)
    marks = page.locator("#tokens mark")
    named = marks.evaluate_all("all => all.map(one => one.dataset.label)")
    assert named == [span["label"] for span in spans]
    marked = marks.all_text_contents()
    place = 0  # the end of the characters that have a mark already
    for span, text in zip(spans, marked, strict=True):
        assert text == TEXT[max(place, span["start"]) : span["end"]]
        place = max(place, span["end"])
    assert page.locator("#tokens .document").text_content() == TEXT
    counts = Counter(span["label"] for span in spans)
    legend = [f"{label}: {counts[label]}" for label in sorted(counts)]
    expect(page.locator("#tokens .legend li")).to_have_text(legend)


def test_no_span_is_said(address: str, page: Page) -> None:
    heads = {"tags": {"labels": ["O"] * 3, "scores": [1.0] * 3, "spans": []}}
    page.route("**/infer*", lambda route: fulfill_changed(route, heads=heads))
    page.goto(address)
    classify(page, TEXT)
    expect(page.locator("#tokens p")).to_have_text("No span was found.")
    expect(page.locator("#tokens .legend li")).to_have_text(["O: 3"])
    expect(page.locator("#label")).to_have_text("1 label of 3 tokens")
    expect(page.locator("#numbers")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tokens_pass_accessibility_checks(address: str, scheme: Any, page: Page) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(address)
    classify(page, TEXT)
    expect(page.locator("#tokens mark").first).to_be_visible()
    check_accessibility(page, "color-contrast")
