"""Zip archives that declare more than they hold."""

import struct
import zipfile
from pathlib import Path

_DIRECTORY = b"PK\1\2"


def overstated(path: Path, name: str, size: int) -> Path:
    """Writes another size of a stored member into the directory of an archive."""
    content = bytearray(path.read_bytes())
    place = content.rindex(name.encode()) - 46
    assert content[place : place + 4] == _DIRECTORY
    struct.pack_into("<II", content, place + 20, size, size)
    path.write_bytes(content)
    return path


def rewritten(path: Path, kind: str) -> Path:
    """Writes the members of an archive otherwise: ``compressed``, or one of them ``twice``."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    how = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        if kind == "twice":
            archive.infolist().append(archive.infolist()[-1])
            archive.filelist = archive.infolist()
    return path


def nested(path: Path, depth: int, size: int) -> Path:
    """Writes an archive whose members overlap: each holds all that follow it."""
    tail = bytes(size)
    entries = []
    for number in reversed(range(depth)):
        name = f"{number}.onnx".encode()
        crc, length = zipfile.crc32(tail), len(tail)
        fields = (10, 0, 0, 0, 0x21, crc, length, length, len(name), 0)
        tail = struct.pack("<4s5H3L2H", b"PK\3\4", *fields) + name + tail
        entries.append((name, fields, len(tail)))
    directory = b""
    for name, fields, length in entries:
        offset = len(tail) - length
        entry = struct.pack("<4s6H3L5H2L", _DIRECTORY, 10, *fields, 0, 0, 0, 0, offset)
        directory += entry + name
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, depth, depth, len(directory), len(tail), 0)
    path.write_bytes(tail + directory + end)
    return path
