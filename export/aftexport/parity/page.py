"""The report as one self-contained HTML file, with its plots of errors."""

from pathlib import Path

from aftexport.parity import Comparison
from aftexport.parity.calibration import TEMPLATES, section_of
from aftexport.parity.plots import error_plot
from aftexport.parity.report import Report, meanings_of, output_of, tolerance_of


def number(value: float | None) -> str:
    """Return the number as in ``1.2e-05``, or ``nan`` or ``inf``; nothing for None."""
    return "" if value is None else f"{value:.1e}"


TEMPLATES.filters["number"] = number


def _label(comparison: Comparison) -> str:
    parts = (comparison.case, output_of(comparison), comparison.engine)
    return ", ".join(filter(None, parts))


def write_page(path: Path, report: Report) -> None:
    """Write the report as a self-contained HTML page."""
    by_length = [
        (float(c.shape[1]), c.largest_error, _label(c), c.bound)
        for c in report.comparisons
        if c.subject.startswith("model")
    ]
    by_layer = None
    if report.layers is not None and report.layers.layers:
        layers, bound = report.layers.layers, report.layers.bound
        by_layer = error_plot(
            [
                (i, t.error, f"{i}, {t.tensor} in {t.module}", bound)
                for i, t in enumerate(layers, 1)
            ],
            names=[layer.tensor for layer in layers],
        )
    page = TEMPLATES.get_template("page.html").render(
        report=report,
        tolerance=tolerance_of(report.manifest),
        scores=meanings_of(report.manifest.heads),
        by_length=error_plot(by_length) if by_length else None,
        by_layer=by_layer,
        calibration=section_of(report.manifest.calibration or {}, report.calibration),
    )
    path.write_text(page, "utf-8")
