"""Checks of a bundle's files against its manifest; files and folder may be links."""

from pathlib import Path

from aftexport.bundle.manifest import FileEntry
from aftexport.errors import BundleError
from aftexport.system.files import sha256

EXPORT_AGAIN = "Export the model again."
_LFS_POINTER = b"version https://git-lfs"


def check_file(path: Path, file: Path, entry: FileEntry) -> None:
    """Check the size and the digest of a file, or of the target of a link.

    Args:
        path: the bundle.
        file: the path of the file in it.
        entry: the description of the file in the manifest.

    Raises:
        BundleError: if the file is missing, or differs from its description.
    """
    check_link(path, file)
    if not file.exists():
        raise BundleError(path, f"{file.name} is missing", EXPORT_AGAIN)
    if not file.is_file():
        raise BundleError(path, f"{file.name} is not a file", EXPORT_AGAIN)
    size = file.stat().st_size
    if size != entry.bytes:
        if _is_pointer(file):
            raise BundleError(
                path, f"{file.name} is a Git LFS pointer, not the file", "Run git lfs pull."
            )
        raise BundleError(
            path, f"{file.name} must have {entry.bytes} bytes, got {size}", EXPORT_AGAIN
        )
    if sha256(file) != entry.sha256:
        raise BundleError(path, f"{file.name} was changed or damaged", EXPORT_AGAIN)


def check_link(path: Path, link: Path) -> None:
    """Check that a link of a bundle has an existing target.

    Args:
        path: the bundle.
        link: the bundle, or a file in it; paths that are not links pass.

    Raises:
        BundleError: if the target does not exist.
    """
    if not link.is_symlink() or link.exists():
        return
    target = link.readlink()
    # A server sends this reason to its clients, which must not see the paths of its files.
    shown = f".../{target.name}" if target.is_absolute() else target
    raise BundleError(
        path,
        f"{'it' if link == path else link.name} is a link to {shown}, where there is no file",
        "Fetch the targets of the bundle's links, or copy a complete bundle: cp -rL.",
    )


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(64).startswith(_LFS_POINTER)
