"""The calibration in the report of a bundle: its errors by length, and when it abstains."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from rich.table import Table

from aftexport.bundle.bundle import CALIBRATION, Bundle
from aftexport.errors import BundleError
from aftexport.heads.calibration import Calibration, Estimate, Threshold
from aftexport.system.console import plain_table

_START, _END = "<!-- calibration -->", "<!-- end of the calibration -->"
_SECTION = re.compile(f"{re.escape(_START)}.*?{re.escape(_END)}", re.DOTALL)
_SIZE, _MARGIN = 260.0, 44.0
_MAX_RADIUS = 9.0

TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("aftexport.parity", "."),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True)
class _Dot:
    """The scores of one bin in a diagram."""

    x: float
    y: float
    radius: float
    label: str


def section_of(
    calibrations: Mapping[str, Calibration], details: Mapping[str, Any] | None
) -> Markup:
    """Return the part of the page between its two comments; without a calibration it is empty."""
    found = details["heads"] if details is not None else {}
    heads = [
        {
            "name": name,
            "calibration": calibration,
            "rows": error_rows(calibration),
            "threshold": calibration.threshold and threshold_sentence(calibration.threshold),
            "diagrams": [_diagram(band) for band in found.get(name, {}).get("bands", ())],
        }
        for name, calibration in calibrations.items()
    ]
    text = TEMPLATES.get_template("calibration.html").render(
        heads=heads, size=_SIZE, margin=_MARGIN, end=_SIZE - _MARGIN
    )
    return Markup(f"{_START}\n{text if heads else ''}{_END}")


def read_details(bundle: Bundle) -> dict[str, Any] | None:
    """Return the content of a bundle's ``calibration.json``; None if it has none."""
    if CALIBRATION not in bundle.files:
        return None
    try:
        details = json.loads((bundle.path / CALIBRATION).read_text("utf-8"))
        section_of(bundle.manifest.calibration or {}, details)
    except (
        *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    ) as error:
        raise BundleError(
            bundle.path,
            f"{CALIBRATION} is not the record of a calibration ({error!r})",
            "Run aftexport calibrate again.",
        ) from error
    return dict(details)


def replace_section(page: Path, section: Markup) -> None:
    """Replace the calibration in a page of ``report.page``."""
    text = page.read_text("utf-8")
    page.write_text(_SECTION.sub(lambda _: str(section), text, count=1), "utf-8")


def error_rows(calibration: Calibration) -> list[tuple[str, str, str, str]]:
    """Return the tokens, the documents and both errors of each band, and of all documents."""
    rows = [
        (
            f"{band.min_tokens:,} to {band.max_tokens:,}",
            f"{band.documents:,}",
            _estimate(band.error_before),
            _estimate(band.error_after),
        )
        for band in calibration.bands
    ]
    if len(rows) > 1:
        total = sum(band.documents for band in calibration.bands)
        errors = (_estimate(calibration.error_before), _estimate(calibration.error_after))
        rows.append(("all", f"{total:,}", *errors))
    return rows


def error_table(calibration: Calibration) -> Table:
    """Return a table of the calibration error by length."""
    table = plain_table("tokens", "documents", "calibration error before", "after (95 %)")
    for row in error_rows(calibration):
        table.add_row(*row)
    return table


def threshold_sentence(threshold: Threshold) -> str:
    """Return the threshold and its error rate in words."""
    return (
        f"Threshold {threshold.confidence:.4g}: {threshold.answered:,} of "
        f"{threshold.documents:,} documents reach it, by scalings of "
        f"{threshold.fit.documents:,} other documents, and "
        f"{threshold.wrong:,} of these answers are wrong. With {100 * threshold.level:.0f} % "
        f"probability, the error rate is at most {threshold.error_bound:.3g}. The server "
        f"abstains on {threshold.abstained:.1%}."
    )


def _diagram(band: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "title": f"{band['min_tokens']:,} to {band['max_tokens']:,} tokens",
        "before": _dots(band["reliability_before"]),
        "after": _dots(band["reliability_after"]),
    }


def _dots(bins: list[dict[str, float]]) -> list[_Dot]:
    total = sum(one["count"] for one in bins)
    if not isfinite(total):
        raise ValueError(f"expected finite counts, got {total}")
    if total == 0:
        return []
    side = _SIZE - 2 * _MARGIN
    return [
        _Dot(
            round(_MARGIN + side * one["mean_score"], 1),
            round(_SIZE - _MARGIN - side * one["share"], 1),
            round(max(2.0, _MAX_RADIUS * (one["count"] / total) ** 0.5), 1),
            f"{one['count']:,} scores of mean {one['mean_score']:.3f}: "
            f"{one['share']:.3f} came true",
        )
        for one in bins
    ]


def _estimate(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
