"""Files with one document each, as text or as an array; apart, as they need no pyarrow."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from aftexport.errors import AftexportError, InputError, UsageError
from aftserve.errors import DocumentTooLongError, utf8_remedy

ARRAY = ".npy"
"""Suffix of a file with the token ids or the features of one document."""
_MAX_CHARACTER_BYTES = 4
"""Maximum bytes of a character in UTF-8."""


def read_text(path: Path, max_characters: int) -> str | AftexportError:
    """Return the text of a file of at most ``max_characters``, or the error of the file."""
    try:
        with path.open("rb") as file:
            return text_in(file, max_characters)
    except OSError as error:
        return InputError(f"The file cannot be read ({error.strerror}).", "Check it.")


def text_in(file: BinaryIO, max_characters: int) -> str | AftexportError:
    """Return the text of an open file; see ``read_text``."""
    max_bytes = _MAX_CHARACTER_BYTES * max_characters
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        return DocumentTooLongError(
            f"A text must have at most {max_characters} characters, got a file of more than "
            f"{max_bytes} bytes.",
            "Leave it out.",
        )
    try:
        return content.decode("utf-8-sig")  # like the server's plain text
    except UnicodeDecodeError as error:
        return InputError(
            f"The file is not UTF-8 at byte {error.start}.", utf8_remedy(error.object)
        )


def shown(path: Path) -> str:
    """Return a path as text; bytes that are not UTF-8 become ``\\x`` and two digits."""
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, and broken links and links to folders, which then fail."""
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in (*folders, *names)):
            nowhere = path.is_symlink() and (path.is_dir() or not path.exists())
            if (path.is_file() or nowhere) and not path.name.startswith("."):
                yield path


def _unreadable(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read ({error.strerror}).", "Check it.")
