"""Zip archives of members that are not compressed: to read one takes no more than its own bytes."""

import zipfile

_ENCRYPTED = 1


def unstored_member(archive: zipfile.ZipFile, size: int) -> str | None:
    """Return why reading an archive could take more memory than the archive has bytes.

    Args:
        archive: an archive whose directory was read.
        size: bytes of its file.

    Returns:
        A reason that names the member; None where every member is stored once and on its own.
    """
    names, total = set[str](), 0
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            return f"{member.filename} in it is compressed"
        if member.file_size != member.compress_size:
            return (
                f"{member.filename} in it has {member.compress_size} bytes, which are said to hold "
                f"{member.file_size}"
            )
        if member.filename in names:
            return f"{member.filename} stands in it twice"
        names.add(member.filename)
        total += member.file_size
        if total > size:
            return f"it has {size} bytes, and its members up to {member.filename} have {total}"
    return None
