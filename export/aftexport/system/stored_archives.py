"""Zip archives without compression, which can be read in the memory of their own size."""

import zipfile

_ENCRYPTED = 1


def unstored_member(archive: zipfile.ZipFile, size: int) -> str | None:
    """Return the reason why an archive could need more memory than its size.

    Args:
        archive: an open archive.
        size: the size of its file in bytes.

    Returns:
        A reason that names the member; None if every member is stored once, without overlap.
    """
    names, total = set[str](), 0
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
            return f"{member.filename} in it is compressed"
        if member.file_size != member.compress_size:
            return (
                f"{member.filename} in it must be stored in {member.file_size} bytes, got "
                f"{member.compress_size}"
            )
        if member.filename in names:
            return f"{member.filename} is in it twice"
        names.add(member.filename)
        total += member.file_size
        if total > size:
            return f"it has {size} bytes, and its members up to {member.filename} have {total}"
    return None
