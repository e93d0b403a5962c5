import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.golden import Case
from aftexport.parity import Comparison, compare
from aftexport.parity.page import write_page
from aftexport.parity.report import Report


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
