"""The bundle with its calibration, which replaces another only when complete, and its report."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aftexport.bundle.bundle import CALIBRATION, PARITY_PAGE, Bundle, write_manifest
from aftexport.bundle.output_path import check_output_path
from aftexport.calibration.calibrate import FOLDS, CalibratedHead, band_masks, bins_of
from aftexport.calibration.fit import TREND_LEVEL, Fit
from aftexport.errors import BundleError, UsageError
from aftexport.heads.calibration import Calibration, Scaling
from aftexport.parity.calibration import replace_section, section_of, threshold_sentence
from aftexport.system.files import aside_folder, move_into_place, sha256, write_json


def check_target(bundle: Path, out: Path | None, *, force: bool) -> None:
    """Check that the calibrated bundle can be written, before the documents run.

    Raises:
        UsageError: if the folder is refused; gives the reason.
    """
    if out is not None:
        check_output_path(out, bundle, force)
        return
    if bundle.is_symlink():
        raise UsageError(
            f"Only a folder can be replaced, got the link {bundle}.",
            "Give --out with a new folder.",
        )
    try:
        with aside_folder(bundle.resolve()):
            pass
    except OSError as error:
        raise UsageError(
            f"{bundle} cannot be replaced ({error.strerror}).", "Give --out with a new folder."
        ) from error


def write_calibrated(
    bundle: Bundle,
    out: Path | None,
    calibration: Mapping[str, Calibration],
    report: Mapping[str, Any],
) -> Bundle:
    """Write a bundle with the calibration of its heads, and move it into place.

    ``out`` is the folder of the new bundle; None to replace ``bundle``. ``report`` is that of
    ``report_of``.

    Raises:
        BundleError: if the bundle changed since it was opened.
    """
    target = (out or bundle.path).resolve()
    with aside_folder(target) as aside:
        new = aside / target.name
        new.mkdir()
        for name in bundle.files:
            # An engine may be missing: Bundle.open does not check it.
            if name != CALIBRATION and (bundle.path / name).exists():
                shutil.copyfile(bundle.path / name, new / name)
        write_json(new / CALIBRATION, report)
        if (new / PARITY_PAGE).exists():
            replace_section(new / PARITY_PAGE, section_of(calibration, report))
        manifest = bundle.manifest.model_copy(update={"calibration": dict(calibration)})
        write_manifest(new, manifest)
        written = Bundle.open(new)
        if Bundle.open(bundle.path).digest != bundle.digest:
            raise BundleError(
                bundle.path, "it changed while its documents ran", "Run the command again."
            )
        move_into_place(new, target)
    return Bundle(out or bundle.path, written.manifest, written.files, written.digest)


def report_of(data: Path, heads: Mapping[str, CalibratedHead]) -> dict[str, Any]:
    """Return the content of ``calibration.json``, with the digest of the file of documents."""
    return {
        "data_sha256": sha256(data),
        "folds": FOLDS,
        "trend_level": TREND_LEVEL,
        "heads": {name: _head_report(head) for name, head in heads.items()},
    }


def _head_report(head: CalibratedHead) -> dict[str, Any]:
    content = head.calibration.model_dump()
    content["labelled_documents"] = len(head.sample)
    content["fits"] = [
        {
            "label": label,
            "trend_p_value": fit.p_value,
            "loss_before": fit.loss_before,
            "loss_after": fit.loss_after,
        }
        for label, fit in zip(_labels(head), head.fits, strict=True)
    ]
    masks = band_masks(head.sample.tokens)
    for band, mask in zip(content["bands"], masks, strict=True):
        part = head.sample.part(mask)
        for moment, scores in (("before", head.before), ("after", head.after)):
            bins = bins_of(*part.observations(scores[mask]))
            band[f"reliability_{moment}"] = [asdict(one) for one in bins]
    return content


def _labels(head: CalibratedHead) -> tuple[str | None, ...]:
    """Return the label of each scaling; None for that of all labels."""
    sample = head.sample
    return sample.head.names if sample.has_independent_labels else (None,)


def sentences(head: CalibratedHead) -> list[str]:
    """Return a sentence on each scaling, and on the threshold."""
    found = [
        _scaling_sentence(label, fit, head.calibration)
        for label, fit in zip(_labels(head), head.fits, strict=True)
    ]
    if (threshold := head.calibration.threshold) is not None:
        found.append(threshold_sentence(threshold))
    return found


def _scaling_sentence(label: str | None, fit: Fit, calibration: Calibration) -> str:
    scaling = fit.scaling
    ends = (calibration.min_tokens, calibration.max_tokens)
    low, high = (_temperature(scaling, tokens) for tokens in ends)
    text = "" if label is None else f"{label}: "
    if scaling.slope:
        text += f"temperature {low:.3g} at {ends[0]:,} tokens to {high:.3g} at {ends[1]:,}"
    else:
        text += f"temperature {low:.3g} at every length"
    if label is not None:
        text += f", bias {scaling.bias:+.3g}"
    if fit.p_value is None:
        return f"{text}. The documents are too few, or too equal in length, to test for a trend."
    trend = "a trend" if scaling.slope else "no trend"
    return f"{text}. The likelihood-ratio test finds {trend} by length (p = {fit.p_value:.2g})."


def _temperature(scaling: Scaling, tokens: int) -> float:
    return math.exp(scaling.log_temperature + scaling.slope * math.log2(tokens))
