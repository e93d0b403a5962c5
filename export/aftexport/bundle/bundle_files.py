"""The files of a bundle against its manifest; each may be a link, and so may their folder."""

from pathlib import Path

from aftexport.bundle.manifest import FileEntry
from aftexport.errors import BundleError
from aftexport.system.files import sha256

EXPORT_AGAIN = "Export the model again."
_LFS_POINTER = b"version https://git-lfs"


def check_file(path: Path, file: Path, entry: FileEntry) -> None:
    """Check the size and the digest of a file, or of the file that a link leads to.

    Args:
        path: the bundle.
        file: the path of the file in it.
        entry: the description of the file in the manifest.

    Raises:
        BundleError: if the file is missing, or another one.
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
            path, f"{file.name} has {size} bytes instead of {entry.bytes}", EXPORT_AGAIN
        )
    if sha256(file) != entry.sha256:
        raise BundleError(path, f"{file.name} was changed or damaged", EXPORT_AGAIN)


def check_link(path: Path, link: Path) -> None:
    """Check that a link of a bundle leads somewhere.

    Args:
        path: the bundle.
        link: the bundle, or a file in it; one that is not a link passes.

    Raises:
        BundleError: if there is nothing at its end.
    """
    if not link.is_symlink() or link.exists():
        return
    target = link.readlink()
    # A server tells its clients why it refuses a bundle, and not where files lie.
    shown = f".../{target.name}" if target.is_absolute() else target
    raise BundleError(
        path,
        f"{'it' if link == path else link.name} is a link to {shown}, where there is no file",
        "Fetch what the links of the bundle lead to, or copy it from where it is whole: cp -rL.",
    )


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(64).startswith(_LFS_POINTER)
