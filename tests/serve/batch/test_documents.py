"""Texts that are read from files and from Parquet."""

import os
from pathlib import Path

import pyarrow as pa
from arrow_arrays import unchecked_strings

from aftserve.batch.documents import texts_of
from aftserve.errors import DocumentTooLongError


def test_oversized_text_file_is_refused(tmp_path: Path) -> None:
    files = {"long": "\N{GRINNING FACE}" * 10, "too long": "a" * 41}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    block = pa.table({"path": [os.fsencode(tmp_path / name) for name in files]})
    long, too_long = texts_of(block, 10)
    assert long == files["long"]
    assert isinstance(too_long, DocumentTooLongError)


def test_invalid_utf8_fails_one_document() -> None:
    block = pa.table({"text": unchecked_strings(b"a", b"a\xff", b"b")})
    one, broken, other = texts_of(block, 100)
    assert (one, other) == ("a", "b")
    assert "not UTF-8 at byte 1" in str(broken)
