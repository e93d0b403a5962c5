"""Where a bundle or a report is to go, checked before there is one."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from aftexport.bundle.bundle import is_replaceable
from aftexport.errors import UsageError
from aftexport.system.files import aside_folder, is_device


def check_output_path(out: Path, path: Path, force: bool) -> None:
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
    """Refuses a file or folder beside which nothing can be written, or one in a bundle.

    Args:
        option: that names it.
        path: of it.

    Raises:
        UsageError: saying why.
    """
    parents = (*path.resolve().parents, *path.absolute().parents)  # those of a link's target, too
    if bundle := next(filter(is_replaceable, parents), None):
        raise UsageError(
            f"{option} {path} lies in the bundle {bundle.name}, whose files are its own.",
            "Choose another place.",
        )
    try:
        with aside_folder(path):
            pass
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be made ({error.strerror}).", "Choose another place."
        ) from error


def check_reports(reports: Mapping[str, Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuses a report that cannot be made, or would be written over what it is of.

    Args:
        reports: the file of each by its option; None for none.
        inputs: files, and folders in which none is to be changed; None for none.

    Raises:
        UsageError: saying why.
    """
    kept = [path for path in inputs if path is not None]
    options: dict[Path, str] = {}
    for option, path in reports.items():
        if path is None or is_device(path):
            continue
        place = path.resolve()
        over = next((i for i in kept if place.is_relative_to(i.resolve())), None)
        over = over or next((i for i in kept if place in _targets(i)), None)
        if over is not None:
            what = f"lies in {over}" if over.is_dir() else "is read too"
            raise UsageError(f"{option} {path} {what}.", "Choose another file.")
        if path.is_dir():
            raise UsageError(f"{option} {path} is a folder.", "Choose a file.")
        if (other := options.setdefault(place, option)) != option:
            raise UsageError(f"{other} and {option} are both {path}.", "Choose another file.")
        check_can_be_made(option, path)


def _targets(folder: Path) -> set[Path]:
    """Where the links in a folder lead: a bundle may consist of them."""
    if not folder.is_dir():
        return set()
    return {file.resolve() for file in folder.iterdir() if file.is_symlink()}
