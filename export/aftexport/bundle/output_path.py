"""Checks of the output paths of bundles and reports before they are written; folders of bundles."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aftexport.bundle.bundle import MANIFEST, is_replaceable
from aftexport.errors import UsageError
from aftexport.system.files import aside_folder, is_device


def check_output_path(out: Path, path: Path | None, force: bool) -> None:
    """Refuse a folder that cannot be made, or holds files that must not be lost."""
    if path is not None and path.resolve() == out.resolve():
        raise UsageError(
            f"--out must not be the model itself, got {out}.", "Choose another folder."
        )
    if path is not None and path.resolve().is_relative_to(out.resolve()):
        raise UsageError(
            f"--out must not contain the model {path}, got {out}.", "Choose another folder."
        )
    if out.is_symlink():
        raise UsageError(f"--out must not be a link, got {out}.", "Choose another folder.")
    check_can_be_made("--out", out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or not is_replaceable(out):
        raise UsageError(
            f"--out must be a new folder or a bundle, got {out}, which exists and is not a bundle.",
            "Choose another --out.",
        )
    if not force:
        raise UsageError(
            f"--out {out} exists.", "Add --force to replace it, or choose another --out."
        )


def check_can_be_made(option: str, path: Path) -> None:
    """Refuse a path that cannot be made; ``option`` names it in the error.

    A device or a pipe, such as ``/dev/stdout``, is made already.
    """
    if is_device(path):
        return
    parents = (*path.resolve().parents, *path.absolute().parents)  # also those of a link's target
    if bundle := next(filter(is_replaceable, parents), None):
        raise UsageError(
            f"{option} must be outside bundles, got {path}, which lies in the bundle "
            f"{bundle.name}.",
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
    """Refuse a report that cannot be made, or would overwrite an input."""
    kept = [path for path in inputs if path is not None]
    options: dict[Path, str] = {}
    for option, path in reports.items():
        if path is None or is_device(path):
            continue
        place = path.resolve()
        over = next((i for i in kept if place.is_relative_to(i.resolve())), None)
        over = over or next((i for i in kept if place in _targets(i)), None)
        if over is not None:
            relation = f"lies in {over}" if over.is_dir() else "is also an input"
            raise UsageError(
                f"{option} must not overwrite an input, got {path}, which {relation}.",
                "Choose another file.",
            )
        if path.is_dir():
            raise UsageError(f"{option} must be a file, got the folder {path}.", "Choose a file.")
        if (other := options.setdefault(place, option)) != option:
            raise UsageError(f"{other} and {option} are both {path}.", "Choose another file.")
        check_can_be_made(option, path)


def _targets(folder: Path) -> set[Path]:
    """Return the targets of the links in a folder: a bundle may consist of links."""
    if not folder.is_dir():
        return set()
    return {file.resolve() for file in folder.iterdir() if file.is_symlink()}


@dataclass(frozen=True)
class BundleFolder:
    """The content of a folder of bundles."""

    bundles: Sequence[Path]
    # subfolders that cannot be read, which may be bundles, each with its error
    unread: Mapping[Path, OSError]


def read_folder(folder: Path) -> BundleFolder:
    """Return the bundles in a folder, without hidden ones; OSError if it cannot be listed."""
    bundles, unread = list[Path](), dict[Path, OSError]()
    for child in sorted(folder.iterdir()):
        if child.name.startswith("."):
            continue
        try:
            if _has_manifest(child):
                bundles.append(child)
        except OSError as error:
            unread[child] = error
    return BundleFolder(bundles, unread)


def folder_or_none(path: Path) -> BundleFolder | None:
    """Return the content of a folder that is not a bundle itself.

    It is None for a bundle, and for a path that is not a folder or cannot be read: ``Bundle.open``
    tells the reason.
    """
    try:
        return read_folder(path) if path.is_dir() and not _has_manifest(path) else None
    except OSError:
        return None


def _has_manifest(path: Path) -> bool:
    """Return whether a path is a folder with a manifest, valid or not."""
    try:
        (path / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
