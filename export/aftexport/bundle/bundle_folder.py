"""Folders whose subfolders are bundles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aftexport.bundle.bundle import MANIFEST


@dataclass(frozen=True)
class BundleFolder:
    """The content of a folder of bundles.

    Attributes:
        bundles: paths of the bundles, in the order of their names.
        unread: the subfolders that cannot be read, which may be bundles, each with its error.
    """

    bundles: Sequence[Path]
    unread: Mapping[Path, OSError]


def read_folder(folder: Path) -> BundleFolder:
    """Return the bundles in a folder; hidden subfolders do not count.

    Raises:
        OSError: if the folder cannot be read.
    """
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
    """Return whether a path is a folder with a manifest, valid or not.

    Raises:
        OSError: if the path cannot be read.
    """
    try:
        (path / MANIFEST).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
