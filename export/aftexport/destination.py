"""Where a bundle is to go, checked before there is one."""

from pathlib import Path

from aftexport.bundle import is_replaceable
from aftexport.errors import UsageError
from aftexport.files import aside_folder


def check_destination(out: Path, path: Path, force: bool) -> None:
    """Refuses a folder that cannot be made, or holds what is not to be lost.

    Args:
        out: the folder.
        path: of the model that is exported.
        force: whether a bundle there may be replaced.

    Raises:
        UsageError: saying why.
    """
    if path.resolve() == out.resolve():
        raise UsageError(f"--out {out} is the model itself.", "Choose another folder.")
    if path.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"The model lies in --out {out}.", "Choose another folder.")
    if out.is_symlink():
        raise UsageError(f"--out {out} is a link.", "Choose another folder.")
    check_can_be_made("--out", out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not is_replaceable(out):
        raise UsageError(f"{out} exists and is not a bundle.", "Choose another --out.")
    if not force:
        raise UsageError(f"{out} exists.", "Add --force to replace it, or choose another --out.")


def check_can_be_made(option: str, path: Path) -> None:
    """Refuses a file or folder beside which nothing can be written.

    Args:
        option: that names it.
        path: of it.

    Raises:
        UsageError: saying why.
    """
    try:
        with aside_folder(path):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be made ({error.strerror}).", "Choose another place."
        ) from error
