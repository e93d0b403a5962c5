"""``aftexport calibrate`` finds the temperature that the labels were drawn by, in a real bundle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from bundles import of_links
from calibrations import labelled, write_lines
from commands import assert_refused, listing, run_here, without

from aftexport.bundle.bundle import Bundle
from aftexport.calibration.data import read_labelled_documents, run_documents
from aftexport.system.installation import install_command

TEMPERATURE = 0.2


@pytest.fixture(scope="module")
def documents(bundle_folder: Path) -> list[dict[str, Any]]:
    return labelled(bundle_folder, 200, temperature=TEMPERATURE)


@pytest.fixture
def data(documents: list[dict[str, Any]], tmp_path: Path) -> Path:
    return write_lines(tmp_path / "labelled.jsonl", documents)


def section(page: str) -> str:
    """Return the calibration of a page."""
    return page[page.index("<h2>Calibration</h2>") : page.index("<h2>Method</h2>")]


def test_bundle_is_replaced(
    bundle_copy: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page_file = tmp_path / "page.html"
    before, files = Bundle.open(bundle_copy), listing(bundle_copy)
    outcome = run_here(["calibrate", bundle_copy, "--data", data], capsys)
    assert outcome.code == 0, outcome.err
    after = Bundle.open(bundle_copy)
    assert after.digest != before.digest
    assert after.digest in outcome.out.replace("\n", "")
    calibration = (after.manifest.calibration or {})["logits"]
    (scaling,) = calibration.scalings
    # Three standard errors: 0.13 over twelve other draws of 200 documents.
    assert scaling.log_temperature == pytest.approx(np.log(TEMPERATURE), abs=0.4)
    assert (scaling.slope, calibration.documents, calibration.threshold) == (0.0, 200, None)
    assert calibration.error_after.high < calibration.error_before.low
    assert "finds no trend by length" in outcome.out
    changed = {name for name, content in listing(bundle_copy).items() if files.get(name) != content}
    assert changed == {"manifest.json", "calibration.json", "parity.html"}
    page = (bundle_copy / "parity.html").read_text("utf-8")
    assert page.count("<h2>Calibration</h2>") == 1
    assert page.count('id="reliability-1-') == 2 * len(calibration.bands)
    assert after.manifest == before.manifest.model_copy(
        update={"calibration": after.manifest.calibration}
    )
    report = json.loads((bundle_copy / "calibration.json").read_text())["heads"]["logits"]
    assert sum(band["documents"] for band in report["bands"]) == 200
    assert sum(one["count"] for one in report["bands"][0]["reliability_after"]) == 200
    assert list(bundle_copy.parent.glob(".*")) == []
    shown = run_here(["inspect", bundle_copy], capsys)
    assert "logits: temperature, 200 documents" in shown.out
    assert f"{calibration.error_before.low:.3f} to" in shown.out
    assert run_here(["verify", bundle_copy, "--report", page_file], capsys).code == 0
    checked = page_file.read_text("utf-8")
    assert section(checked) == section(page)


def test_other_bundle_is_written(
    bundle_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A calibrated bundle can be calibrated again, and a budget adds a threshold."""
    files, out = listing(bundle_folder), tmp_path / "out.bundle"
    words = ["--data", data, "--out", out]
    assert run_here(["calibrate", bundle_folder, *words], capsys).code == 0
    assert listing(bundle_folder) == files
    first = Bundle.open(out)
    assert_refused(run_here(["calibrate", bundle_folder, *words], capsys), "--out", "exists")
    outcome = run_here(
        ["calibrate", out, "--data", data, "--error-budget", "0.2", "--out",
         tmp_path / "again.bundle"], capsys
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert Bundle.open(out).digest == first.digest
    found = (Bundle.open(tmp_path / "again.bundle").manifest.calibration or {})["logits"]
    assert found.threshold is not None
    assert (found.documents, found.threshold.documents) == (200, 103)
    assert found.threshold.error_bound <= 0.2
    assert "The server abstains on" in outcome.out
    page = (tmp_path / "again.bundle" / "parity.html").read_text("utf-8")
    assert page.count("<h2>Calibration</h2>") == 1
    assert "The server abstains on" in page
    assert "The server abstains on" in run_here(["inspect", tmp_path / "again.bundle"], capsys).out


def test_dry_run_writes_nothing(
    bundle_copy: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = listing(bundle_copy.parent)
    outcome = run_here(["calibrate", bundle_copy, "--data", data, "--dry-run"], capsys)
    assert outcome.code == 0, outcome.err
    assert "Nothing was written" in outcome.out
    assert "Expected different documents" not in outcome.out
    assert listing(bundle_copy.parent) == files


def test_hopeless_budget_writes_nothing(
    bundle_copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels by chance cannot be answered with 5 % of errors."""
    chance = labelled(bundle_copy, 200, temperature=100.0)
    data = write_lines(tmp_path / "chance.jsonl", chance)
    files = listing(bundle_copy)
    outcome = run_here(["calibrate", bundle_copy, "--data", data, "--error-budget", "0.05"], capsys)
    assert outcome.code == 1
    assert "most certain answers" in outcome.err
    assert listing(bundle_copy) == files


def test_bad_requests_are_refused(
    bundle_copy: Path, documents: list[dict[str, Any]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    files = listing(bundle_copy)
    few = write_lines(tmp_path / "few.jsonl", documents[:96])
    refused = run_here(["calibrate", bundle_copy, "--data", few], capsys)
    assert_refused(refused, "at least 97 labelled documents, got 96")
    words = ["--data", few, "--error-budget", "0.01"]
    refused = run_here(["calibrate", bundle_copy, *words], capsys)
    assert_refused(refused, "at least 448 labelled documents, got 96")
    one_kind = write_lines(tmp_path / "one.jsonl", [one | {"label": "letter"} for one in documents])
    refused = run_here(["calibrate", bundle_copy, "--data", one_kind], capsys)
    assert_refused(refused, "at least 10 documents with the label 'invoice', got 0")
    assert "Running" not in refused.out
    bad = write_lines(tmp_path / "bad.jsonl", [*documents[:2], {"text": "a", "label": "bill"}])
    assert_refused(run_here(["calibrate", bundle_copy, "--data", bad], capsys), "line 3", "'bill'")
    (tmp_path / "links").mkdir()
    link = of_links(bundle_copy, "folder", tmp_path / "links")
    refused = run_here(["calibrate", link, "--data", few], capsys)
    assert_refused(refused, "got the link", "--out")
    for budget in ("0", "1", "much"):
        words = ["--data", few, "--error-budget", budget]
        assert run_here(["calibrate", bundle_copy, *words], capsys).code == 2
    assert listing(bundle_copy) == files


def test_command_needs_scipy_but_no_torch(bundle_copy: Path, data: Path, tmp_path: Path) -> None:
    words = ("calibrate", bundle_copy, "--data", data)
    refused = without(["scipy"], "aftexport", *words, cwd=tmp_path)
    assert_refused(refused, install_command("calibrate"))
    outcome = without(["torch", "onnxscript"], "aftexport", *words, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert Bundle.open(bundle_copy).manifest.calibration is not None


def test_long_documents_run_in_chunks(
    bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget of 1 MiB runs every document in chunks, with the same logits."""
    bundle = Bundle.open(bundle_folder)
    long = [{"input_ids": [1 + i % 200] * 3000, "label": tiny_models.LABELS[i]} for i in range(3)]
    data = write_lines(tmp_path / "long.jsonl", long)
    found = read_labelled_documents(data, bundle.manifest, None)
    whole = run_documents(bundle, found, progress=lambda *_: None)["logits"]
    monkeypatch.setattr("aftexport.calibration.data.MEMORY_BUDGET", 1 << 20)
    chunks = run_documents(bundle, found, progress=lambda *_: None)["logits"]
    np.testing.assert_allclose(chunks.logits, whole.logits, rtol=0, atol=1e-4)
    assert (chunks.logits != whole.logits).any()
    assert whole.tokens.tolist() == [3000] * 3
    assert whole.truths.tolist() == [0, 1, 2]


def test_older_bundle_loads_unchanged(bundle_copy: Path) -> None:
    """A manifest without the field is read, and has no calibration."""
    path = bundle_copy / "manifest.json"
    content = json.loads(path.read_text("utf-8"))
    assert content.pop("calibration") is None
    path.write_text(json.dumps(content), "utf-8")
    assert Bundle.open(bundle_copy).manifest.calibration is None
