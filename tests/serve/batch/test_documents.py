"""Texts that are read from files and from Parquet."""

import os
from pathlib import Path

import pyarrow as pa
import pytest
from text_folders import unchecked_strings

from aftexport.errors import UsageError
from aftserve.batch.documents import find, texts_of
from aftserve.errors import DocumentTooLongError


@pytest.mark.parametrize("option", ["text", "id"])
def test_column_of_text_files_is_refused(option: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    columns: dict[str, str | None] = {"text": None, "id": None}
    assert find(tmp_path, **columns).count == 1
    with pytest.raises(UsageError, match=f"--{option} names a column of Parquet"):
        find(tmp_path, **columns | {option: "text"})


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
