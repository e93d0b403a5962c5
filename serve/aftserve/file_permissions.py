"""Who may read or replace a file that decides whom the server answers."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path


def exposures(file: Path) -> Iterator[str]:
    """Yield what every user of the machine may do with a file, one sentence each.

    Args:
        file: a file or a link to one. Folders count as far up as the root, of both.

    Raises:
        OSError: if the file cannot be looked at.
    """
    if os.name != "posix":
        return  # the bits say nothing of access there
    mode = file.stat().st_mode
    if mode & stat.S_IWOTH:
        yield f"every user may write {file}, and so add keys: chmod o-w it"
    if mode & stat.S_IROTH:
        yield f"every user may read {file}: chmod o-r it"
    for folder in dict.fromkeys((*file.absolute().parents, *file.resolve().parents)):
        mode = folder.stat().st_mode
        # In a sticky folder, such as /tmp, users cannot replace files of others.
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield f"every user may write the folder {folder}, and so replace {file}: chmod o-w it"
