"""The calibration in the report: errors by length, reliability, and the threshold."""

import json
from pathlib import Path
from typing import Any

import pytest
from bundles import changed_manifest, resealed
from calibrations import calibration, details

from aftexport.bundle.bundle import Bundle
from aftexport.errors import BundleError
from aftexport.heads.calibration import Scaling
from aftexport.parity.calibration import read_details, replace_section, section_of

SCALING = Scaling(log_temperature=0.5)


def test_section_shows_errors_by_length() -> None:
    text = section_of({"logits": calibration(SCALING, above=0.8)}, details())
    assert "130 to 1,024" in text
    assert "0.210 (0.180 to 0.250)" in text
    assert "0.030 (0.010 to 0.060)" in text
    assert ">all<" in text
    assert "Threshold 0.8: 50 of 100 documents" in text


def test_section_draws_each_band() -> None:
    text = section_of({"logits": calibration(SCALING)}, details())
    assert text.count("<svg") == 2
    assert text.count("<title>before: ") == text.count("<title>after: ") == 4
    # A share below the score lies below the line from the lower left to the upper right.
    assert 'cx="207.4" cy="87.0"' in text
    assert "40 scores of mean 0.950: 0.750 came true" in text
    assert "no error budget was given" in text


def test_names_are_escaped() -> None:
    text = section_of({"<b>": calibration(SCALING)}, details("<b>"))
    assert "<b>" not in text
    assert "&lt;b&gt;" in text


def test_section_replaces_itself(tmp_path: Path) -> None:
    page, empty = tmp_path / "page.html", section_of({}, None)
    page.write_text(f"before {empty} after", "utf-8")
    for above in (0.7, 0.8):
        section = section_of({"logits": calibration(SCALING, above=above)}, details())
        replace_section(page, section)
        assert page.read_text("utf-8") == f"before {section} after"
    replace_section(page, empty)
    assert page.read_text("utf-8") == f"before {empty} after"


def test_bundle_without_calibration_has_no_details(bundle_folder: Path) -> None:
    assert read_details(Bundle.open(bundle_folder)) is None


def with_counts(*counts: float) -> str:
    """Return the record with other counts of scores in its bins."""
    record: Any = details()
    bands = record["heads"]["logits"]["bands"]
    for one, count in zip(bands[0]["reliability_before"], counts, strict=False):
        one["count"] = count
    return json.dumps(record)


def test_bins_without_scores_have_no_dots() -> None:
    text = section_of({"logits": calibration(SCALING)}, json.loads(with_counts(0, 0)))
    assert "<svg" in text
    assert "<circle" not in text


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"heads": {"logits": {"bands": [{}]}}}',
        with_counts(10**400, 1e-300),
        with_counts(-1, 3),
        with_counts(float("inf"), 1),
    ],
)
def test_bad_details_are_refused(content: str, bundle_copy: Path) -> None:
    (bundle_copy / "calibration.json").write_text(content, "utf-8")
    changed_manifest(bundle_copy, {"calibration": {"logits": calibration(SCALING).model_dump()}})
    bundle = Bundle.open(resealed(bundle_copy))
    with pytest.raises(BundleError, match=r"calibration\.json is not the record"):
        read_details(bundle)


def test_details_are_read(bundle_copy: Path) -> None:
    (bundle_copy / "calibration.json").write_text(json.dumps(details()), "utf-8")
    assert read_details(Bundle.open(resealed(bundle_copy))) == details()
