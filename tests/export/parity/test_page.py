import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calibrations import calibration, details

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.golden import Case
from aftexport.heads.calibration import Scaling
from aftexport.parity import Comparison, compare
from aftexport.parity.page import write_page
from aftexport.parity.report import Blame, Layer, Layers, Report


class Outline(HTMLParser):
    """The tags and attributes that an accessibility check reads."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, *names: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag in names]


def comparison(name: str, output: float, tokens: int = 3) -> Comparison:
    inputs = {"input_ids": np.zeros((1, tokens), np.int64)}
    case = Case(name, "model", inputs, {"logits": np.array([[0.5, 0.0]])})
    (result,) = compare(case, {"logits": np.array([[0.5 + output, 0.0]], np.float32)}, "fp32")
    return result


@pytest.fixture
def passing(bundle_folder: Path, tmp_path: Path) -> str:
    return written(bundle_folder, tmp_path, [comparison("a", 1e-6), comparison("b", 3e-6, 4000)])


@pytest.fixture
def failing(bundle_folder: Path, tmp_path: Path) -> str:
    results = [comparison("a", 1e-6), comparison("<script>", float("nan")), comparison("c", 0.5)]
    return written(bundle_folder, tmp_path, results)


def written(bundle_folder: Path, tmp_path: Path, results: list[Comparison]) -> str:
    manifest = Bundle.open(bundle_folder).manifest
    inputs = {r.case: {"input_ids": np.arange(500)[None]} for r in results}
    report = Report(manifest, results, inputs=inputs, environment={"system": "a & b"})
    write_page(tmp_path / "page.html", report)
    return (tmp_path / "page.html").read_text("utf-8")


def test_verdict_comes_first_with_reason(passing: str, failing: str) -> None:
    for page, verdict in ((passing, "Ship"), (failing, "Do not ship")):
        body = page[page.index("<body>") :]
        text = re.sub(r"<[^>]*>|\s+", " ", body).split()
        assert " ".join(text).startswith(verdict)
        assert f"<title>{verdict}:" in page
    assert "2 of 3 comparisons are outside" in failing
    assert "All 2 comparisons with PyTorch are within" in passing


def test_error_of_scores_is_shown(bundle_folder: Path, tmp_path: Path) -> None:
    """A near tie of large logits: their error is within tolerance, that of the scores is not."""
    inputs = {"input_ids": np.zeros((1, 3), np.int64)}
    case = Case("a", "model", inputs, {"logits": np.array([[10000.0, 10000.0, 0.0]])})
    heads = Bundle.open(bundle_folder).manifest.heads
    output = np.array([[10000.5, 10000.0, 0.0]])
    (result,) = compare(case, {"logits": output}, "fp32", heads=heads)
    assert result.score_error is not None
    page = written(bundle_folder, tmp_path, [comparison("b", 1e-6), result])
    assert "has an error of 1.2e-01 in its scores or values, more than 1e-04" in page
    assert f"<dt>Largest error</dt><dd>{result.score_error:.1e}</dd>" in page
    assert (
        f'<td class="number">5.0e-05</td><td class="number">{result.score_error:.1e}</td>' in page
    )


def test_shown_text_is_escaped(failing: str) -> None:
    assert "<script>" not in failing
    assert "&lt;script&gt;" in failing
    assert "a &amp; b" in failing
    assert "OUTSIDE" in failing


def test_a_bundle_not_checked_says_so(bundle_folder: Path, tmp_path: Path) -> None:
    page = written(bundle_folder, tmp_path, [])
    assert "<h1>Not checked</h1>" in page
    assert "within tolerance" not in page


def test_page_needs_no_other_file(failing: str) -> None:
    outline = Outline(failing)
    assert not outline.all("script", "link", "img", "iframe")
    assert not re.search(r"https?://|url\(|@import", failing)


def test_page_has_accessible_outline(passing: str, failing: str) -> None:
    for page in (passing, failing):
        outline = Outline(page)
        assert outline.all("html")[0]["lang"] == "en"
        levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch("h[1-6]", tag)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(b - a <= 1 for a, b in pairwise(levels))
        ids = [a["id"] for _, a in outline.tags if "id" in a]
        assert len(ids) == len(set(ids))
        for drawing in outline.all("svg"):
            assert drawing["role"] == "img"
            assert set(str(drawing["aria-labelledby"]).split()) <= set(ids)
        assert all(header["scope"] in ("row", "col") for header in outline.all("th"))
        assert outline.all("svg")
        assert outline.all("th")


def test_a_failure_shows_without_color(failing: str) -> None:
    outline = Outline(failing)
    outside = [a for a in outline.all("path") if a["class"] == "outside"]
    assert len(outside) == 2
    assert len(outline.all("circle")) == 1
    assert failing.count(">OUTSIDE</td>") == 2


def test_same_report_gives_same_page(passing: str, bundle_folder: Path, tmp_path: Path) -> None:
    again = written(bundle_folder, tmp_path, [comparison("a", 1e-6), comparison("b", 3e-6, 4000)])
    assert again == passing


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
needs_browser = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")

MEASURE = """
addEventListener("load", async () => {
  const found = await axe.run();
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify({
    violations: found.violations.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 120))]),
    passed: found.passes.map(p => p.id),
    overflow: document.documentElement.scrollWidth - innerWidth,
    verdict: document.querySelector(".verdict").getBoundingClientRect().bottom,
    facts: document.querySelector(".facts").getBoundingClientRect().bottom,
    height: innerHeight,
  });
  document.body.append(out);
});
"""


@pytest.fixture
def report(bundle_folder: Path) -> Report:
    blame = Blame(
        "add_49", ["encoder.layers.1.ffn.2"], "LayerNormFeedForward", "fused kernel", "export",
        0.5, {"definition": 0.5}, ["encoder.layers.1.ffn.2.weight differs."],
    )  # fmt: skip
    layers = [
        Layer("linear", "encoder.layers.0.attention", "MatMul", "standard operator", 1e-7, False),
        Layer("add_49", "encoder.layers.1", "LayerNormFeedForward", "fused kernel", 0.5, True),
    ]  # fmt: skip
    results = [comparison("a", 1e-6), comparison("b", 0.5, 4000)]
    found = Layers("b", 1e-4, layers, [], [], blame)
    scaling = Scaling(log_temperature=0.5, slope=0.1)
    manifest = Bundle.open(bundle_folder).manifest.model_copy(
        update={"calibration": {"logits": calibration(scaling, above=0.8)}}
    )
    return Report(manifest, results, layers=found, calibration=details())


def test_blame_contradicts_no_verdict(report: Report) -> None:
    """An output may be outside tolerance though each tensor is within."""
    assert report.layers is not None
    within = replace(report.layers, layers=report.layers.layers[:1])
    grown, other = replace(report, layers=within), replace(within, blame=None)
    assert "error of the output grows first at add_49. The cause is the export" in (
        grown.blame or ""
    )
    text = replace(report, layers=other).blame or ""
    assert text.endswith("The error is in another run: the model, case 'b'.")


def measured(report: Report, folder: Path, width: int, height: int) -> dict[str, Any]:
    """Measure the page in a browser window of the given size."""
    write_page(folder / "page.html", report)
    script = files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")
    page = (folder / "page.html").read_text("utf-8")
    page = page.replace("</body>", f"<script>{script}</script><script>{MEASURE}</script></body>")
    (folder / "measured.html").write_text(page, "utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000",
         f"--window-size={width},{height}", f"--user-data-dir={folder / 'profile'}",
         "--dump-dom", (folder / "measured.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    text = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert text, done.stderr
    found = text[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    result: dict[str, Any] = json.loads(found)
    return result


@needs_browser
def test_page_passes_accessibility_check(report: Report, tmp_path: Path) -> None:
    found = measured(report, tmp_path, 1000, 800)
    assert found["violations"] == []
    assert {"color-contrast", "html-has-lang", "document-title"} <= set(found["passed"])


@needs_browser
def test_phone_shows_verdict_without_scrolling(report: Report, tmp_path: Path) -> None:
    """Nothing lies beside the screen either."""
    found = measured(report, tmp_path, 500, 900)
    assert found["overflow"] <= 0
    assert found["verdict"] < found["height"]
