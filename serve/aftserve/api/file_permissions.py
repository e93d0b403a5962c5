"""Permissions of the file of API keys, and of the folders on the way to it."""

import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAX_LINKS = 40
"""Maximum number of links that Linux follows in one path."""


def exposures(file: Path) -> Iterator[str]:
    """Yield a sentence for each way in which every user of the machine may read or replace a file.

    Args:
        file: a file or a link to one. All folders that the system passes on the way are checked.

    Raises:
        OSError: if the file cannot be examined.
    """
    if os.name != "posix":
        return  # other systems do not use the permission bits
    mode = file.stat().st_mode
    if mode & stat.S_IWOTH:
        yield f"every user may write {file}, and so add keys: chmod o-w it"
    if mode & stat.S_IROTH:
        yield f"every user may read {file}: chmod o-r it"
    for folder in _folders_to(file):
        mode = folder.stat().st_mode
        # In a sticky folder, such as /tmp, users cannot replace files of others.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"every user may write the folder {folder}, and so replace {file}: chmod o-w it"


def _folders_to(file: Path) -> Iterable[Path]:
    """Return the folders in which a name of the path, or of a link on it, is looked up."""
    folders: dict[Path, None] = {}
    folder, links = Path(file.absolute().anchor), 0
    names = deque(file.absolute().parts[1:])
    while names:
        folders[folder] = None
        name = names.popleft()
        place = folder.parent if name == ".." else folder / name
        if place.is_symlink() and links < _MAX_LINKS:
            links += 1
            target = place.readlink()
            names.extendleft(reversed(target.parts[1:] if target.is_absolute() else target.parts))
            place = Path(target.anchor) if target.is_absolute() else folder
        folder = place
    return folders
