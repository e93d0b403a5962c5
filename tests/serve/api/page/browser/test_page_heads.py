"""The answers of other heads on the page: labels that hold, and values with units."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from page_driver import ORDINARY, check_accessibility, classify, fulfill_changed, set_spread
from playwright.sync_api import Locator, Page, expect
from servers import Serve

import aftexport
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export

LABELS, THRESHOLDS = ["urgent", "legal", "spam"], [0.001, 0.999, 0.25]
VALUES: list[dict[str, Any]] = [
    {"name": "age", "unit": "years", "minimum": 20.0, "maximum": 120.0, "scale": 5.0,
     "offset": 60.0},
    {"name": "mass", "unit": "kg"},
    {"name": "risk", "minimum": 0.0, "maximum": 1.0, "offset": 50.0},
]  # fmt: skip


def exported(folder: Path, head: dict[str, Any]) -> Path:
    """Export a small model of three outputs with a head."""
    torch.manual_seed(5)
    settings = tiny_models.CONFIG | {"problem_type": head["task"]}
    model = DocumentClassifier(ClassifierConfig(**settings)).eval()
    tokenizer = tiny_models.byte_tokenizer().to_str()
    aftexport.save(folder / "model.pt", model=model, labels=LABELS, tokenizer=tokenizer)
    (folder / "heads.json").write_text(json.dumps({"logits": head}))
    return export(folder / "model.pt", heads=folder / "heads.json").path


@pytest.fixture(scope="module")
def of_labels(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    head = {"task": "multi_label_classification", "labels": LABELS, "thresholds": THRESHOLDS}
    return serve(exported(tmp_path_factory.mktemp("labels"), head))


@pytest.fixture(scope="module")
def of_values(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    head = {"task": "regression", "values": VALUES}
    return serve(exported(tmp_path_factory.mktemp("values"), head))


def style_of(elements: Locator, name: str) -> Sequence[float]:
    """Return a length of each element's own style, in percent."""
    texts = elements.evaluate_all("(found, name) => found.map(one => one.style[name])", name)
    assert all(text.endswith("%") for text in texts), texts
    return [float(text[:-1]) for text in texts]


def test_labels_that_hold_are_marked(of_labels: str, page: Page) -> None:
    page.goto(of_labels)
    expect(page.locator("#model")).to_have_text(
        f"model. Finds which hold of 3 labels: {', '.join(LABELS)}."
    )
    answer = classify(page, ORDINARY)["heads"]["logits"]
    assert answer["labels"] == ["urgent", "spam"]
    expect(page.locator("#label .chip")).to_have_text(answer["labels"])
    expect(page.locator("#remark")).to_have_text("Labels that hold: 2 of 3")
    expect(page.locator("#status")).to_contain_text("urgent, spam, Labels that hold: 2 of 3")
    expect(page.locator("#scores thead th")).to_have_text(["Label", "Score"])

    ranked = sorted(answer["scores"].items(), key=lambda entry: -entry[1])
    shown = [f"{name} holds" if name in answer["labels"] else name for name, _ in ranked]
    expect(page.locator("#scores tbody th")).to_have_text(shown)
    expect(page.locator("#scores td.number")).to_have_text([f"{100 * x:.1f} %" for _, x in ranked])
    bars = style_of(page.locator("#scores .bar div div"), "width")
    assert bars == pytest.approx([100 * score for _, score in ranked], rel=1e-4)
    lines = style_of(page.locator("#scores .threshold"), "left")
    known = dict(zip(LABELS, THRESHOLDS, strict=True))
    assert lines == pytest.approx([100 * known[name] for name, _ in ranked])


def test_no_label_is_said(of_labels: str, page: Page) -> None:
    heads = {"logits": {"labels": [], "scores": dict.fromkeys(LABELS, 0.1)}}
    page.route("**/infer*", lambda route: fulfill_changed(route, heads=heads))
    page.goto(of_labels)
    classify(page, ORDINARY)
    expect(page.locator("#label")).to_have_text("No label")
    expect(page.locator("#label .chip, #scores .chip")).to_have_count(0)


def test_calibrated_probabilities_are_shown(of_labels: str, page: Page) -> None:
    calibrated = {"urgent": 0.25, "legal": 0.125, "spam": 0.75}
    scores = dict.fromkeys(LABELS, 0.5)
    content = {"labels": ["spam"], "scores": scores, "calibrated": calibrated, "abstain": True}
    page.route("**/infer*", lambda route: fulfill_changed(route, heads={"logits": content}))
    page.goto(of_labels)
    classify(page, ORDINARY)
    expect(page.locator("#remark")).to_have_text(
        "Labels that hold: 1 of 3, too uncertain for the error budget"
    )
    expect(page.locator("#scores-title")).to_have_text("Calibrated probabilities")
    expect(page.locator("#scores thead th")).to_have_text(["Label", "Probability"])
    expect(page.locator("#scores tbody th")).to_have_text(["spam holds", "urgent", "legal"])
    expect(page.locator("#scores td.number")).to_have_text(["75.0 %", "25.0 %", "12.5 %"])
    expect(page.locator("#scores .threshold")).to_have_count(0)


def test_evidence_names_label(of_labels: str, page: Page) -> None:
    page.goto(of_labels)
    name = classify(page, ORDINARY)["evidence"]["name"]
    assert name in LABELS
    expect(page.locator("#evidence-note")).to_contain_text(f"The logit of {name} is ")


def test_click_on_label_shows_its_evidence(of_labels: str, page: Page) -> None:
    set_spread(page, spread=False)
    page.goto(of_labels)
    classify(page, ORDINARY)
    for place, name in (("#label", "spam"), ("#scores", "legal")):
        button = page.locator(place).get_by_role("button", name=name, exact=True)
        with page.expect_response("**/infer?*") as waiting:
            button.click()
        (found,) = waiting.value.json()["explained"]
        assert (found["head"], found["name"]) == ("logits", name)
        expect(page.locator("#evidence-note")).to_contain_text(f"The logit of {name} is ")
        expect(page.locator("#status")).to_contain_text(f"Evidence for {name}; passages")
        expect(page.locator("#spans tbody tr")).to_have_count(len(found["spans"]))
        expect(page.locator("#document mark")).to_have_count(len(found["spans"]))


def test_click_on_value_shows_its_evidence(of_values: str, page: Page) -> None:
    page.goto(of_values)
    classify(page, ORDINARY)
    page.locator("#scores").get_by_role("button", name="mass").click()
    expect(page.locator("#evidence-note")).to_contain_text("The logit of mass is ")


def test_values_have_units_and_range(of_values: str, page: Page) -> None:
    page.goto(of_values)
    expect(page.locator("#model")).to_have_text("model. Estimates age, mass, risk.")
    values = classify(page, ORDINARY)["heads"]["logits"]["values"]
    age, mass, risk = (float(f"{values[value['name']]:.6g}") for value in VALUES)
    assert 20 < age < 120 < 100 * risk
    shown = [f"{age:g} years", f"{mass:g} kg", f"{risk:g}"]
    chips = [f"age {shown[0]}", f"mass {shown[1]}", f"risk {shown[2]}"]
    expect(page.locator("#label .chip")).to_have_text(chips)
    expect(page.locator("#remark")).to_have_text("risk is outside its range, 0 to 1")
    expect(page.locator("#scores-title")).to_have_text("Values")
    expect(page.locator("#scores thead th")).to_have_text(["Value", "Estimate"])
    expect(page.locator("#scores td.number")).to_have_text(shown)
    expect(page.locator("#scores th .hint")).to_have_text(["20 to 120 years", "0 to 1"])
    rows = page.locator("#scores tbody tr")
    expect(rows.nth(1).locator(".bar div")).to_have_count(0)
    bars = style_of(page.locator("#scores .bar div div"), "width")
    assert bars == pytest.approx([values["age"] - 20, 100], rel=1e-4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("head", ["of_labels", "of_values"])
def test_head_passes_accessibility_checks(
    head: str, scheme: Any, page: Page, request: pytest.FixtureRequest
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(request.getfixturevalue(head))
    classify(page, ORDINARY)
    expect(page.locator("#label .chip").first).to_be_visible()
    check_accessibility(page, "color-contrast")
