"""A calibrated bundle replaces another only when it is complete."""

import errno
from pathlib import Path

import pytest
from bundles import changed_manifest
from calibrations import calibration, details
from commands import listing

from aftexport.bundle.bundle import Bundle
from aftexport.calibration import calibrated_bundle
from aftexport.calibration.calibrated_bundle import check_target, write_calibrated
from aftexport.errors import BundleError, UsageError
from aftexport.heads.calibration import Scaling

CALIBRATION = {"logits": calibration(Scaling(log_temperature=0.5))}


@pytest.mark.parametrize("step", ["write_json", "write_manifest", "move_into_place"])
def test_failure_keeps_old_bundle(
    step: str, bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, files = Bundle.open(bundle_copy), listing(bundle_copy.parent)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(calibrated_bundle, step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_calibrated(bundle, None, CALIBRATION, details())
    assert listing(bundle_copy.parent) == files


def test_changed_bundle_is_not_replaced(bundle_copy: Path) -> None:
    bundle = Bundle.open(bundle_copy)
    changed_manifest(bundle_copy, {"tolerance": 0.5})
    files = listing(bundle_copy.parent)
    with pytest.raises(BundleError, match="it changed while its documents ran"):
        write_calibrated(bundle, None, CALIBRATION, details())
    assert listing(bundle_copy.parent) == files


def test_written_bundle_has_all_files(bundle_copy: Path, tmp_path: Path) -> None:
    bundle, out = Bundle.open(bundle_copy), tmp_path / "new" / "out.bundle"
    written = write_calibrated(bundle, out, CALIBRATION, details())
    assert (written.path, written.manifest.calibration) == (out, CALIBRATION)
    assert written.files.keys() == bundle.files.keys() | {"calibration.json"}
    again = Bundle.open(out)
    assert (again.digest, again.manifest) == (written.digest, written.manifest)


def test_targets_are_checked(bundle_copy: Path, tmp_path: Path) -> None:
    check_target(bundle_copy, None, force=False)
    check_target(bundle_copy, tmp_path / "new.bundle", force=False)
    (tmp_path / "link").symlink_to(bundle_copy, target_is_directory=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for bundle, out in [
        (tmp_path / "link", None), (bundle_copy, bundle_copy), (bundle_copy, bundle_copy / "inner"),
        (bundle_copy, tmp_path / "other"),
    ]:  # fmt: skip
        with pytest.raises(UsageError):
            check_target(bundle, out, force=True)
