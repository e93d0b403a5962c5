import csv
import json
from pathlib import Path

import pytest

from aftexport.demo.own_documents import DocumentsError, read_documents

ROWS = [('a, "quoted"\nline', "one"), ("zwei \N{SNOWMAN}", "two")]


def test_csv_gives_texts_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(
            [("id", "text", "label"), *((i, *row) for i, row in enumerate(ROWS))]
        )
    corpus = read_documents(path)
    assert list(zip(corpus.texts, corpus.labels, strict=True)) == ROWS


def test_jsonl_gives_texts_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "own.JSONL"
    lines = [json.dumps({"text": text, "label": label, "id": 1}) for text, label in ROWS]
    path.write_text("\n\n".join(lines) + "\n", "utf-8")
    corpus = read_documents(path)
    assert list(zip(corpus.texts, corpus.labels, strict=True)) == ROWS


def test_csv_takes_documents_over_field_limit(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"text,label\n{'word ' * 40_000},long\n", "utf-8")
    before = csv.field_size_limit()
    assert len(read_documents(path).texts[0]) == 200_000
    assert csv.field_size_limit() == before


BAD_FILES = {
    "no_label_column.csv": ("text,class\na,b\n", 1, "no column label"),
    "no_columns.csv": ("a,b\nc,d\n", 1, "no column text and no column label"),
    "empty.csv": ("", 1, "no column text"),
    "no_rows.csv": ("text,label\n", None, "no documents"),
    "short_row.csv": ("text,label\na,b\nc\n", 3, "no label"),
    "long_row.csv": ("text,label\na,b\nc,d,e\n", 3, "expected 2 values, got 3"),
    "blank_text.csv": ('text,label\na,b\n"  ",b\n', 3, "text is empty"),
    "blank_label.csv": ("text,label\na,\n", 2, "label is empty"),
    "open_quote.csv": ('text,label\n\n"a\na",b\n"c,d\ne,f\n', 5, "invalid CSV"),
    "not_json.jsonl": ('{"text": "a", "label": "b"}\n{"text": \n', 2, "invalid JSON"),
    "deep.jsonl": ("[" * 100_000 + "\n", 1, "invalid JSON"),
    "list.jsonl": ('["a", "b"]\n', 1, "expected a JSON object, got list"),
    "no_text.jsonl": ('\n{"label": "b"}\n', 2, "no text"),
    "null_label.jsonl": ('{"text": "a", "label": null}\n', 1, "no label"),
    "number_label.jsonl": ('{"text": "a", "label": 3}\n', 1, "label must be a string, got int"),
    "surrogate.jsonl": ('{"text": "\\ud800", "label": "b"}\n', 1, "half a surrogate pair"),
    "empty.jsonl": ("", None, "no documents"),
    "documents.txt": ("text,label\na,b\n", None, "expected a name with .csv or .jsonl, got .txt"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_line_error_has_remedy(name: str, tmp_path: Path) -> None:
    """The error also names the line."""
    content, line, reason = BAD_FILES[name]
    path = tmp_path / name
    path.write_text(content, "utf-8")
    with pytest.raises(DocumentsError) as caught:
        read_documents(path)
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(path) in caught.value.problem
    assert line is None or f"line {line}" in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("text,label\ncaf\N{LATIN SMALL LETTER E WITH ACUTE},b\n".encode("latin-1"))
    with pytest.raises(DocumentsError, match="expected UTF-8, got the byte 0xe9"):
        read_documents(path)


@pytest.mark.parametrize("name", ["missing.csv", "folder.csv"])
def test_unreadable_file_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DocumentsError, match="cannot be read"):
        read_documents(tmp_path / name)
