"""The page as people use it, in a browser. Skipped where there is no Chromium."""

import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from bundles import changed_manifest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright
from servers import serving

from aftserve.api.api_keys import make_key

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")

AXE = files("axe_core_python").joinpath("axe.min.js")
GOLDEN = re.compile(
    r"^(\d+) of \1 golden cases are within tolerance; "
    r"the worst error is [\d.]+ % of its bound\.$"
)
PHONE, DESK = 390, 1440
ORDINARY = "An ordinary document, of which nothing is to be feared. "

# When the keys were pressed, and when the answer was on the screen.
TIMED = """() => {
addEventListener("keydown", event => {
  if (event.ctrlKey && event.key === "Enter") began = performance.now();
});
const drawn = resolve => requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
window.shown = new Promise(resolve => new MutationObserver(() => drawn(resolve))
  .observe(document.getElementById("answer"), { attributeFilter: ["hidden"] }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(bundle_folder, tmp_path_factory.mktemp("page") / "log") as (address, _):
        yield address


@pytest.fixture(scope="module")
def keys() -> dict[str, tuple[str, str]]:
    return {"always": make_key("always", None), "rarely": make_key("rarely", "1/hour")}


@pytest.fixture(scope="module")
def guarded(
    bundle_folder: Path, keys: dict[str, tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server that asks for API keys, lets pages of another origin ask, and has no evidence."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys.toml").write_text("\n".join(section for _, section in keys.values()))
    bundle = Path(shutil.copytree(bundle_folder, folder / "old.bundle"))
    changed_manifest(bundle, {"evidence": None})
    options = ("--api-keys", str(folder / "keys.toml"), "--cors-origins", "https://other.example")
    with serving(bundle, folder / "log", *options) as (address, _):
        yield address


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    with browser.new_context(viewport={"width": DESK, "height": 900}) as context:
        yield context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """Of whom no request leaves the origin, no policy is broken, and no script fails."""
    page, asked, said = context.new_page(), list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.set_default_timeout(20_000)
    yield page
    origin = page.evaluate("origin")
    assert asked
    assert [url for url in asked if not url.startswith((f"{origin}/", "data:"))] == []
    # A refusal is no fault of the page, but the browser says it.
    assert [line for line in said if not line.startswith("Failed to load resource")] == []


def classify(page: Page, text: str) -> Any:
    """Sends a document; returns the last answer."""
    page.fill("#text", text)
    with page.expect_response("**/infer*") as response:
        page.press("#text", "Control+Enter")
    expect(page.locator("#stop")).to_be_hidden()
    return response.value.json()


def pieces(text: str, spans: list[dict[str, Any]]) -> list[str]:
    """The text outside and within each span, in turn."""
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


def test_a_long_document_by_the_keyboard_alone(
    address: str, context: BrowserContext, page: Page
) -> None:
    text = (ORDINARY * 2000)[:100_000]
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(address)
    page.evaluate("text => navigator.clipboard.writeText(text)", text)
    page.evaluate(TIMED)
    page.keyboard.press("Tab")
    assert focused(page) == "text"
    page.keyboard.press("Control+V")
    with page.expect_response("**/infer*") as response:
        page.keyboard.press("Control+Enter")
    expect(page.locator("#answer")).to_be_visible()
    seconds = page.evaluate("shown.then(time => time - began)") / 1000
    answer = response.value.json()
    assert shown_pieces(page) == pieces(text, answer["evidence"]["spans"])
    expect(page.locator("#label")).to_have_text(answer["label"])
    expect(page.locator("#read")).to_contain_text("the whole document: 100,000 tokens")
    expect(page.locator("#status")).to_contain_text(answer["label"])
    expect(page.locator("#scores tbody tr")).to_have_count(3)
    assert seconds - answer["timings"]["inference_seconds"] < 2

    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches(':focus-visible')")
        if focused(page) == "#passage-1":
            break
    page.keyboard.press("Enter")
    expect(page.locator("mark:target")).to_be_in_viewport()


def test_what_answers_is_said(address: str, page: Page) -> None:
    page.goto(address)
    expect(page.locator("#parity")).to_have_text("Parity with PyTorch: within tolerance")
    info = page.request.get(f"{address}/info").json()
    golden = page.request.get(f"{address}/parity").json()["golden"]
    expect(page.locator("#bundle")).to_have_text(info["bundle"])
    expect(page.locator("#golden tbody tr")).to_have_count(len(golden))
    expect(page.locator("#golden-note")).to_have_text(GOLDEN)
    answer = classify(page, ORDINARY)
    expect(page.locator("#answered-by")).to_have_text(answer["bundle"])
    assert page.locator("#times dd").count() == 5


def test_hostile_text_is_text(address: str, page: Page) -> None:
    text = "<script>hacked = 1</script><img src=x onerror='hacked = 1'></div>&lt;" * 3
    page.goto(address)
    answer = classify(page, text)
    assert shown_pieces(page) == pieces(text, answer["evidence"]["spans"])
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("#document > :not(mark)").count() == 0


def test_an_emoji_shifts_no_highlight(address: str, page: Page) -> None:
    text = "one 🙂 or 👩‍👩‍👧‍👦 then e\u0301, 漢字, 𝄞 and 🇫🇷 again; " * 20
    page.goto(address)
    page.fill("#passages", "100")
    answer = classify(page, text)
    spans = answer["evidence"]["spans"]
    assert len(spans) > 20
    assert shown_pieces(page) == pieces(text, spans)


def test_half_a_surrogate_pair_is_shown_as_what_was_sent(address: str, page: Page) -> None:
    page.goto(address)
    # By a script: no protocol of a driver takes it.
    page.evaluate("document.getElementById('text').value = 'a\\ud800b\\ud83d\\ude00'")
    with page.expect_response("**/infer*") as response:
        page.press("#text", "Control+Enter")
    assert response.value.status == 200
    expect(page.locator("#answer")).to_be_visible()
    assert "".join(shown_pieces(page)) == "a\ufffdb\U0001f600"


def drop(page: Page, name: str, content: bytes) -> None:
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


def test_a_dropped_file_is_sent_as_it_is(address: str, page: Page) -> None:
    page.goto(address)
    drop(page, "two lines.txt", b"\xef\xbb\xbfone\r\ntwo, \xc3\xa9\r\n")
    expect(page.locator("#status")).to_have_text("Read two lines.txt.")
    expect(page.locator("#text")).to_have_value("\ufeffone\ntwo, é\n")
    with page.expect_request("**/infer*") as request:
        page.click("text=Classify")
    assert request.value.post_data_json == {"text": "\ufeffone\r\ntwo, é\r\n"}
    with page.expect_request("**/infer*") as request:
        page.press("#text", "End")
        page.keyboard.type("!")
        page.keyboard.press("Control+Enter")
    assert "!" in request.value.post_data_json["text"]
    assert "\r" not in request.value.post_data_json["text"]


LEFT_OF_FIRST = """() => {
const texts = document.createTreeWalker(document.getElementById("document"), NodeFilter.SHOW_TEXT);
while (!texts.nextNode().length);
const range = document.createRange();
range.setStart(texts.currentNode, 0);
range.setEnd(texts.currentNode, 1);
const place = document.getElementById("document").getBoundingClientRect();
return (range.getBoundingClientRect().left - place.left) / place.width;
}"""


@pytest.mark.parametrize(
    ("text", "least", "most"), [("שלום, a b.", 0.5, 1), ("a b, שלום.", 0, 0.5)]
)
def test_a_line_begins_at_the_side_of_its_script(
    text: str, least: float, most: float, address: str, page: Page
) -> None:
    page.goto(address)
    classify(page, text)
    assert least < page.evaluate(LEFT_OF_FIRST) < most


def test_a_file_that_is_chosen(address: str, page: Page, tmp_path: Path) -> None:
    page.goto(address)
    (tmp_path / "document.txt").write_text(ORDINARY)
    page.set_input_files("#file", tmp_path / "document.txt")
    expect(page.locator("#text")).to_have_value(ORDINARY)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    page.set_input_files("#file", tmp_path / "picture.png")
    expect(page.locator("#problem")).to_contain_text("must be text in UTF-8")
    expect(page.locator("#text")).to_have_value(ORDINARY)


def test_a_document_that_is_too_long(server: str, page: Page) -> None:
    page.goto(server)
    answer = classify(page, "a" * 6001)
    expect(page.locator("#problem h2")).to_have_text("The server answers 413")
    expect(page.locator("#problem p")).to_have_text(answer["detail"])
    expect(page.locator("#answer")).to_be_hidden()
    classify(page, ORDINARY)
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#answer")).to_be_visible()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": 503, "json": {"detail": "It is stopping."}}, "503 It is stopping."),
        ({"status": 502, "body": "<html>"}, "502 The response is not JSON"),
        ({"status": 200, "body": "<html>"}, "200 The response is not JSON"),
        ({"status": 503, "json": {"detail": "<b>"}, "headers": {"Retry-After": "7"}},
         "503 <b> Try again in 7 s."),
        (None, "No answer The server cannot be reached"),
    ],
)  # fmt: skip
def test_what_goes_wrong_on_the_way(
    address: str, page: Page, answer: dict[str, Any] | None, said: str
) -> None:
    page.goto(address)
    page.route("**/infer*", lambda route: route.fulfill(**answer) if answer else route.abort())
    page.fill("#text", ORDINARY)
    page.click("text=Classify")
    expect(page.locator("#problem")).to_contain_text(said, use_inner_text=True)


def test_a_request_can_be_stopped(address: str, page: Page) -> None:
    page.goto(address)
    page.route("**/infer*", lambda route: None)
    page.fill("#text", ORDINARY)
    page.click("text=Classify")
    page.click("#stop")
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator("#stop")).to_be_hidden()


def changed(route: Route, **fields: Any) -> None:
    """The server's own answer, but for some fields."""
    route.fulfill(json=route.fetch().json() | fields)


def test_a_passage_without_characters_is_in_the_list_alone(address: str, page: Page) -> None:
    """As of the tokens that a tokenizer puts before and behind a text."""
    spans = [
        {"start_token": 0, "end_token": 1, "contribution": 2.0, "above_average": 1.5},
        {"start_token": 4, "end_token": 6, "contribution": 1.0, "above_average": 0.5,
         "start": 3, "end": 5, "text": "or"},
    ]  # fmt: skip
    evidence = {"logit": 3.0, "offset": 0.0, "spans": spans}
    page.route("**/infer*", lambda route: changed(route, evidence=evidence))
    page.goto(address)
    classify(page, ORDINARY)
    assert shown_pieces(page) == pieces(ORDINARY, spans[1:])
    rows = page.locator("#spans tbody tr")
    expect(rows.nth(0)).to_contain_text("Tokens 0 to 0, which have no characters")
    expect(rows.nth(1).locator("a")).to_have_attribute("href", "#passage-2")


def test_what_was_cut_off_is_said(address: str, page: Page) -> None:
    page.route("**/infer*", lambda route: changed(route, truncated=True, tokens_total=9000,
                                                  tokens_used=8000, policy="head"))  # fmt: skip
    page.goto(address)
    classify(page, ORDINARY)
    said = "The model saw only the head: 8,000 of 9,000 tokens."
    expect(page.locator("#read.warning")).to_have_text(said)


def test_broken_parity_and_another_bundle_are_said(address: str, page: Page) -> None:
    page.route("**/infer*", lambda route: changed(route, bundle="another"))
    page.route("**/parity", lambda route: changed(route, within=False))
    page.goto(address)
    expect(page.locator("#parity.hold")).to_have_text("Parity with PyTorch: OUTSIDE tolerance")
    with page.expect_response("**/info"):
        classify(page, ORDINARY)


def test_keys_are_asked_for_and_kept_nowhere(
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


def test_a_rate_and_when_to_come_again(
    guarded: str, keys: dict[str, tuple[str, str]], page: Page
) -> None:
    page.goto(guarded)
    page.fill("#key", keys["rarely"][0])
    page.fill("#passages", "0")
    classify(page, ORDINARY)
    classify(page, ORDINARY)
    expect(page.locator("#problem h2")).to_have_text("The server answers 429")
    said = re.compile(r"The rate of this API key is 1 per 1 hour\..* Try again in 3,[56]\d\d s\.")
    expect(page.locator("#problem p")).to_have_text(said)


def test_a_document_without_evidence(
    guarded: str, keys: dict[str, tuple[str, str]], page: Page
) -> None:
    page.goto(guarded)
    page.fill("#key", keys["always"][0])
    classify(page, ORDINARY)
    expect(page.locator("#answer")).to_be_visible()
    note = page.locator("#evidence-note")
    expect(note).to_contain_text("The server says: “This model has no evidence: ")
    expect(note).to_contain_text("The page then asked without evidence.")
    expect(page.locator("#document")).to_be_hidden()
    page.fill("#passages", "0")
    classify(page, ORDINARY)
    expect(note).to_have_text("The answer has no evidence. It was not requested.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_everybody_can_read_it(server: str, page: Page, scheme: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(server)
    page.click("summary")
    page.evaluate(AXE.read_text("utf-8"))
    for text, section in ((ORDINARY * 20, "#answer"), ("a" * 6001, "#problem")):
        classify(page, text)
        expect(page.locator(section)).to_be_in_viewport()
        found = page.evaluate("axe.run()")
        assert [(one["id"], one["nodes"]) for one in found["violations"]] == []
        passed = {one["id"] for one in found["passes"]}
        assert {"color-contrast", "label", "scrollable-region-focusable"} <= passed
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize(("motion", "scrolling"), [("reduce", "auto"), ("no-preference", "smooth")])
def test_nothing_moves_for_who_wants_it_still(
    address: str, page: Page, motion: Any, scrolling: str
) -> None:
    page.emulate_media(reduced_motion=motion)
    page.goto(address)
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == scrolling
    classify(page, ORDINARY)
    assert page.evaluate("document.getAnimations().length") == 0
