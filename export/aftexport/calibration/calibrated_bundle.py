"""The bundle with its calibration, which replaces another only when it is complete."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aftexport.bundle.bundle import CALIBRATION, PARITY_PAGE, Bundle, write_manifest
from aftexport.bundle.output_path import check_output_path
from aftexport.errors import BundleError, UsageError
from aftexport.heads.calibration import Calibration
from aftexport.parity.calibration import replace_section, section_of
from aftexport.system.files import aside_folder, move_into_place, write_json


def check_target(bundle: Path, out: Path | None, *, force: bool) -> None:
    """Check that the calibrated bundle can be written, before the documents run.

    Args:
        bundle: the bundle.
        out: the folder of the new bundle; None to replace ``bundle``.
        force: whether a bundle at ``out`` may be replaced.

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
    """Write a bundle with a calibration, and move it into place.

    Args:
        bundle: the bundle.
        out: the folder of the new bundle; None to replace ``bundle``.
        calibration: the calibration of heads by their names.
        report: the content of ``calibration.json``.

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
