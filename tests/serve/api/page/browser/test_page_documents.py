"""Documents on the page: their input, and the passages that the answer marks."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from page_driver import (
    ORDINARY,
    classify,
    drop,
    focused,
    fulfill_changed,
    pieces,
    set_spread,
    shown_pieces,
)
from playwright.sync_api import BrowserContext, Page, expect
from servers import Serve

# Records when the keys are pressed and when the answer is on the screen.
TIMED = """() => {
addEventListener("keydown", event => {
  if (event.ctrlKey && event.key === "Enter") began = performance.now();
});
const drawn = resolve => requestAnimationFrame(() => setTimeout(() => resolve(performance.now())));
window.shown = new Promise(resolve => new MutationObserver(() => drawn(resolve))
  .observe(document.getElementById("answer"), { attributeFilter: ["hidden"] }));
}"""
LEFT_OF_FIRST = """() => {
const texts = document.createTreeWalker(document.getElementById("document"), NodeFilter.SHOW_TEXT);
while (!texts.nextNode().length);
const range = document.createRange();
range.setStart(texts.currentNode, 0);
range.setEnd(texts.currentNode, 1);
const place = document.getElementById("document").getBoundingClientRect();
return (range.getBoundingClientRect().left - place.left) / place.width;
}"""


@pytest.fixture(scope="module")
def address(bundle_folder: Path, serve: Serve) -> str:
    return serve(bundle_folder)


def test_keyboard_classifies_long_document(
    address: str, context: BrowserContext, page: Page
) -> None:
    text = (ORDINARY * 2000)[:100_000]
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    set_spread(page, spread=False)
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


def test_markup_in_document_stays_text(address: str, page: Page) -> None:
    text = "<script>hacked = 1</script><img src=x onerror='hacked = 1'></div>&lt;" * 3
    set_spread(page, spread=False)
    page.goto(address)
    answer = classify(page, text)
    assert shown_pieces(page) == pieces(text, answer["evidence"]["spans"])
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("#document > :not(mark)").count() == 0


def test_emoji_keep_highlights_in_place(address: str, page: Page) -> None:
    text = "one 🙂 or 👩‍👩‍👧‍👦 then e\u0301, 漢字, 𝄞 and 🇫🇷 again; " * 20
    set_spread(page, spread=False)
    page.goto(address)
    page.fill("#passages", "100")
    answer = classify(page, text)
    spans = answer["evidence"]["spans"]
    assert len(spans) > 20
    assert shown_pieces(page) == pieces(text, spans)


def test_lone_surrogate_shows_replacement_character(address: str, page: Page) -> None:
    page.goto(address)
    # Set the value by a script: the driver's protocol cannot carry a lone surrogate.
    page.evaluate("document.getElementById('text').value = 'a\\ud800b\\ud83d\\ude00'")
    with page.expect_response("**/infer*") as response:
        page.press("#text", "Control+Enter")
    assert response.value.status == 200
    expect(page.locator("#answer")).to_be_visible()
    assert "".join(shown_pieces(page)) == "a\ufffdb\U0001f600"


@pytest.mark.parametrize(
    ("text", "min_left", "max_left"), [("שלום, a b.", 0.5, 1), ("a b, שלום.", 0, 0.5)]
)
def test_line_starts_at_script_side(
    text: str, min_left: float, max_left: float, address: str, page: Page
) -> None:
    page.goto(address)
    classify(page, text)
    assert min_left < page.evaluate(LEFT_OF_FIRST) < max_left


def test_passage_without_characters_is_only_listed(address: str, page: Page) -> None:
    """A tokenizer may add such tokens before and after a text."""
    spans = [
        {"start_token": 0, "end_token": 1, "contribution": 2.0, "above_average": 1.5},
        {"start_token": 4, "end_token": 6, "contribution": 1.0, "above_average": 0.5,
         "start": 3, "end": 5, "text": "or"},
    ]  # fmt: skip
    evidence = {"logit": 3.0, "offset": 0.0, "spans": spans}
    page.route("**/infer*", lambda route: fulfill_changed(route, evidence=evidence))
    page.goto(address)
    classify(page, ORDINARY)
    assert shown_pieces(page) == pieces(ORDINARY, spans[1:])
    rows = page.locator("#spans tbody tr")
    expect(rows.nth(0)).to_contain_text("Tokens 0 to 0, which have no characters")
    expect(rows.nth(1).locator("a")).to_have_attribute("href", "#passage-2")


def test_spread_evidence_is_not_painted(address: str, page: Page) -> None:
    set_spread(page, spread=True)
    page.goto(address)
    spans = classify(page, ORDINARY)["evidence"]["spans"]
    assert shown_pieces(page) == [ORDINARY]
    expect(page.locator("#evidence-note")).to_contain_text("Nothing stands out")
    expect(page.locator("#status")).to_contain_text("passages highlighted: 0")
    expect(page.locator("#spans tbody tr")).to_have_count(len(spans))
    expect(page.locator("#spans a")).to_have_count(0)


def test_truncation_shows_warning(address: str, page: Page) -> None:
    truncation = {"truncated": True, "tokens_total": 9000, "tokens_used": 8000, "policy": "head"}
    page.route("**/infer*", lambda route: fulfill_changed(route, **truncation))
    page.goto(address)
    classify(page, ORDINARY)
    warning = "The model saw only the head: 8,000 of 9,000 tokens."
    expect(page.locator("#read.warning")).to_have_text(warning)


def test_dropped_file_is_sent_unchanged(address: str, page: Page) -> None:
    page.goto(address)
    drop(page, "two lines.txt", b"\xef\xbb\xbfone\r\ntwo, \xc3\xa9\r\n")
    expect(page.locator("#status")).to_have_text("Read two lines.txt.")
    expect(page.locator("#text")).to_have_value("\ufeffone\ntwo, é\n")
    with page.expect_request("**/infer*") as request:
        page.click("#send")
    assert request.value.post_data_json == {"text": "\ufeffone\r\ntwo, é\r\n"}
    with page.expect_request("**/infer*") as request:
        page.press("#text", "End")
        page.keyboard.type("!")
        page.keyboard.press("Control+Enter")
    assert "!" in request.value.post_data_json["text"]
    assert "\r" not in request.value.post_data_json["text"]


def test_chosen_file_fills_text_field(address: str, page: Page, tmp_path: Path) -> None:
    page.goto(address)
    (tmp_path / "document.txt").write_text(ORDINARY)
    page.set_input_files("#file", tmp_path / "document.txt")
    expect(page.locator("#text")).to_have_value(ORDINARY)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    page.set_input_files("#file", tmp_path / "picture.png")
    expect(page.locator("#problem")).to_contain_text("Expected text in UTF-8")
    expect(page.locator("#text")).to_have_value(ORDINARY)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_marked_utf_16_is_read(encoding: str, address: str, page: Page) -> None:
    page.goto(address)
    drop(page, "notepad.txt", "\ufeffZoë\r\n😀".encode(encoding))
    expect(page.locator("#text")).to_have_value("Zoë\n😀")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"%PDF-1.7\n", "got a PDF document. Extract its text first"),
        (b"PK\x03\x04\x14", "such as a .docx or .odt document. Save the document as plain text"),
        (b"\xd0\xcf\x11\xe0\xa1", "such as .doc. Save the document as plain text"),
        ("a letter".encode("utf-16-le"), "iconv -f utf-16le -t utf-8"),
        ("Zoë".encode("latin-1"), "iconv -f latin1 -t utf-8"),
        (b"\xff\xfea", "got incomplete UTF-16"),
    ],
)
def test_other_file_gets_remedy(content: bytes, said: str, address: str, page: Page) -> None:
    page.goto(address)
    drop(page, "file", content)
    expect(page.locator("#problem")).to_contain_text(said)
    expect(page.locator("#text")).to_have_value("")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
def test_command_gives_shown_answer(address: str, page: Page) -> None:
    page.goto(address)
    answer = classify(page, 'It\'s a letter, $HOME \\n `of` "two"\nlines! 😀')
    page.click("#program summary")
    expect(page.locator("#json")).to_contain_text('"scores"')  # not before it is shown
    shown = json.loads(page.locator("#json").inner_text())
    assert shown == answer
    command = page.locator("#command").inner_text()
    done = subprocess.run(["sh", "-c", f"{command} --silent"], capture_output=True, check=True)
    found = json.loads(done.stdout)
    assert (found["scores"], found["evidence"]) == (answer["scores"], answer["evidence"])
    page.click("#copy")
    expect(page.locator("#copied")).to_have_text(re.compile("Copied|Press Ctrl"))


def test_long_document_has_command_with_file(address: str, page: Page) -> None:
    page.goto(address)
    classify(page, "a" * 40_000)
    expect(page.locator("#command")).to_contain_text("--json @request.json")


def test_text_survives_reload(address: str, page: Page) -> None:
    """Also the estimate of tokens is shown only after an answer has counted some."""
    page.goto(address)
    page.fill("#text", ORDINARY)
    expect(page.locator("#size")).to_have_text(f"Length: {len(ORDINARY)}.")
    page.reload()
    expect(page.locator("#text")).to_have_value(ORDINARY)
    answer = classify(page, ORDINARY)
    page.fill("#text", ORDINARY * 2)
    wanted = round(2 * answer["tokens_total"])
    expect(page.locator("#size")).to_contain_text(f"About {wanted:,} tokens")
    page.reload()
    expect(page.locator("#text")).to_have_value(ORDINARY * 2)
