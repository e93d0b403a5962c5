"""The answers of several heads on the page: spans with a legend, and vectors."""

import json
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
import several_heads
import tiny_models
import torch
from page_driver import classify, fulfill_changed
from playwright.sync_api import Page, expect
from servers import serving
from torch import Tensor, nn

from aftexport.pipeline.export import export

AXE = files("axe_core_python").joinpath("axe.min.js")
TOPICS = ["news", "mail", "code"]
LABELS = ["O", "B-name", "I-name", "B-place", "I-place"]
HEADS = {
    "topic": {"task": "single_label_classification", "labels": TOPICS},
    "entities": {"task": "token_classification", "labels": LABELS},
    "embedding": {"task": "feature_extraction", "dimensions": 16, "normalize": True},
}
TEXT = "Zoë met 👩‍🚀 Ada in <b>Turin</b>\n\ton the 3rd of May."


class Reader(several_heads.Encoder):
    """A topic and a vector for each document, and a label for each of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.topic, self.entities = nn.Linear(16, len(TOPICS)), nn.Linear(16, len(LABELS))

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        tokens = self.encode(input_ids, lengths)
        pooled = self.pool(tokens, lengths)
        return {
            "topic": self.topic(pooled),
            "entities": 3 * self.entities(tokens),
            "embedding": pooled,
        }


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tokens")
    torch.save(Reader().eval(), folder / "model.pt")
    (folder / "heads.json").write_text(json.dumps(HEADS))
    (folder / "tokenizer.json").write_text(tiny_models.byte_tokenizer().to_str())
    bundle = export(
        folder / "model.pt",
        allow_pickle=True,
        heads=folder / "heads.json",
        tokenizer=folder / "tokenizer.json",
    )
    with serving(bundle.path, folder / "log") as (address, _):
        yield address


def test_each_head_is_shown(address: str, page: Page) -> None:
    page.goto(address)
    expect(page.locator("#model")).to_have_text(
        "Distinguishes 3 classes. Labels every token with one of 5 labels. "
        "Returns a vector of 16 numbers for every document."
    )
    heads = classify(page, TEXT)["heads"]
    assert list(heads) == [*HEADS]
    expect(page.locator("#label .head-name")).to_have_text([*HEADS])
    expect(page.locator("#label")).to_contain_text(heads["topic"]["label"])
    expect(page.locator("#scores tbody th.head-name")).to_have_text("topic")
    expect(page.locator("#scores tbody td.number")).to_have_count(len(TOPICS))
    titles = ["Spans of entities", "Vectors of embedding"]
    expect(page.locator("#tokens h3")).to_have_text(titles)
    numbers = ", ".join(f"{x:.4g}" for x in heads["embedding"]["vector"][:8])
    expect(page.locator("#tokens code")).to_have_text(f"{numbers}, …")


def test_spans_are_marked_with_legend(address: str, page: Page) -> None:
    page.goto(address)
    spans = classify(page, TEXT)["heads"]["entities"]["spans"]
    shown = [span for span in spans if span.get("text")]
    assert {span["label"] for span in shown} == {"name", "place"}
    assert any(ord(character) > 0xFFFF for span in shown for character in span["text"])
    marks = page.locator("#tokens mark")
    assert marks.all_text_contents() == [span["text"] for span in shown]
    assert marks.evaluate_all("all => all.map(one => one.dataset.label)") == [
        span["label"] for span in shown
    ]
    assert page.locator("#tokens .document").text_content() == TEXT
    counts = Counter(span["label"] for span in spans)
    legend = [f"{label}: {counts[label]}" for label in sorted(counts)]
    expect(page.locator("#tokens .legend li")).to_have_text(legend)


def test_no_span_is_said(address: str, page: Page) -> None:
    heads = {"entities": {"labels": ["O"] * 3, "scores": [1.0] * 3, "spans": []}}
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
    page.evaluate(AXE.read_text("utf-8"))
    classify(page, TEXT)
    expect(page.locator("#tokens mark").first).to_be_visible()
    found = page.evaluate("axe.run()")
    assert [(one["id"], one["nodes"]) for one in found["violations"]] == []
    assert "color-contrast" in {one["id"] for one in found["passes"]}
