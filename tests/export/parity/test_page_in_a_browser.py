"""The report in a real browser; skipped if Chromium is not installed."""

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from calibrations import calibration, details

from aftexport.bundle.bundle import Bundle
from aftexport.heads.calibration import Scaling
from aftexport.parity.layers import Blame, Layer, Layers
from aftexport.parity.page import write_page
from aftexport.parity.report import Report

from .test_page import comparison

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")

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


def measured(report: Report, folder: Path, width: int, height: int) -> dict[str, Any]:
    """Measure the page in a browser window of the given size."""
    write_page(folder / "page.html", report)
    script = files("axe_core_python").joinpath("axe.min.js").read_text("utf-8")
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


def test_page_passes_accessibility_check(report: Report, tmp_path: Path) -> None:
    found = measured(report, tmp_path, 1000, 800)
    assert found["violations"] == []
    assert {"color-contrast", "html-has-lang", "document-title"} <= set(found["passed"])


def test_phone_shows_verdict_without_scrolling(report: Report, tmp_path: Path) -> None:
    """Nothing lies beside the screen either."""
    found = measured(report, tmp_path, 500, 900)
    assert found["overflow"] <= 0
    assert found["verdict"] < found["height"]
