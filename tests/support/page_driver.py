"""Actions on the server's page in a browser, and readings of it."""

import re
from importlib.resources import files
from itertools import pairwise
from typing import Any

from playwright.sync_api import Page, Route, expect

GOLDEN = re.compile(
    r"^(\d+) of \1 golden cases are within tolerance; "
    r"the largest error is [\d.]+ % of its bound\.$"
)
PHONE, DESK = 390, 1440
AXE = files("axe_playwright_python").joinpath("axe.min.js")
ORDINARY = "An ordinary document that contains no surprises at all. "


def classify(page: Page, text: str) -> Any:
    """Send a document and return the last answer."""
    page.fill("#text", text)
    with page.expect_response("**/infer*") as response:
        page.press("#text", "Control+Enter")
    expect(page.locator("#stop")).to_be_hidden()
    return response.value.json()


def pieces(text: str, spans: list[dict[str, Any]]) -> list[str]:
    """Return the text outside and within each span, in turn."""
    cuts = [0]
    for span in sorted(spans, key=lambda span: int(span["start"])):
        cuts += [max(cuts[-1], span["start"]), max(cuts[-1], span["end"])]
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]


def shown_pieces(page: Page) -> Any:
    return page.evaluate(
        "[...document.getElementById('document').childNodes].map(node => node.textContent)"
    )


def focused(page: Page) -> Any:
    return page.evaluate("document.activeElement.id || document.activeElement.hash")


def fulfill_changed(route: Route, **fields: Any) -> None:
    """Answer a request of the page with the server's answer after changing some fields."""
    route.fulfill(json=route.fetch().json() | fields)


def set_spread(page: Page, *, spread: bool) -> None:
    """Have all evidence stand out, or none."""

    def fulfill(route: Route) -> None:
        answer = route.fetch().json()
        for evidence in (answer.get("evidence"), *answer.get("explained", ())):
            if evidence:
                evidence["spread"] = spread
        route.fulfill(json=answer)

    page.route("**/infer?*", fulfill)


def check_accessibility(page: Page, *rules: str, part: str = "html") -> None:
    """Check a part of a page by axe, and that the rules were applied."""
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("part => axe.run(part)", part)
    assert [(one["id"], one["nodes"]) for one in found["violations"]] == []
    assert {*rules} <= {one["id"] for one in found["passes"]}


def drop(page: Page, name: str, content: bytes) -> None:
    """Drop a file on the page."""
    data = page.evaluate_handle(
        """([name, content]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(content)], name));
            return data;
        }""",
        [name, list(content)],
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": data})
    page.dispatch_event("body", "drop", {"dataTransfer": data})
