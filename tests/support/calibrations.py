"""Calibrations with chosen scalings and plain numbers in all other fields."""

from aftexport.heads.calibration import Band, Calibration, Estimate, Scaling, Threshold

BEFORE = Estimate(value=0.21, low=0.18, high=0.25)
AFTER = Estimate(value=0.03, low=0.01, high=0.06)
BANDS = (
    Band(min_tokens=16, max_tokens=99, documents=60, error_before=AFTER, error_after=AFTER),
    Band(min_tokens=130, max_tokens=1024, documents=40, error_before=BEFORE, error_after=AFTER),
)


def calibration(
    *scalings: Scaling, method: str = "temperature", above: float | None = None
) -> Calibration:
    """Return a calibration; ``above`` is the confidence of a threshold, None for no threshold."""
    threshold = None
    if above is not None:
        threshold = Threshold(
            budget=0.1, level=0.95, confidence=above, documents=100, answered=50, wrong=1,
            error_bound=0.09, abstained=0.5,
        )  # fmt: skip
    return Calibration.model_validate(
        {
            "method": method, "scalings": scalings, "min_tokens": 16, "max_tokens": 1024,
            "documents": 100, "error_before": BEFORE, "error_after": AFTER, "bands": BANDS,
            "threshold": threshold,
        }
    )  # fmt: skip


def details(name: str = "logits") -> dict[str, object]:
    """Return the content of ``calibration.json`` that belongs to ``BANDS``."""
    bins = [
        {"low": 0.1, "high": 0.2, "count": 20, "mean_score": 0.15, "share": 0.05},
        {"low": 0.9, "high": 1.0, "count": 40, "mean_score": 0.95, "share": 0.75},
    ]
    bands = [
        band.model_dump() | {"reliability_before": bins, "reliability_after": bins}
        for band in BANDS
    ]
    return {"folds": 5, "heads": {name: {"bands": bands}}}
