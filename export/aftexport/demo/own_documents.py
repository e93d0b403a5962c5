"""The user's labeled documents, from a CSV or JSON Lines file."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from aftexport.demo.corpus import Corpus
from aftexport.errors import AftexportError

_FIELD_LIMIT = 2**31 - 1

Row = tuple[int, Any, Any]
"""The first line of a row, its text and its label."""


class DocumentsError(AftexportError):
    """A file of labeled documents is invalid."""

    def __init__(self, path: Path, reason: str, remedy: str, line: int | None = None) -> None:
        place = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{place}: {reason}.", remedy)
        self.path = path
        self.reason = reason
        self.line = line


def read_documents(path: Path) -> Corpus:
    """Read documents with their labels."""
    reader = {".csv": _csv_rows, ".jsonl": _json_rows}.get(path.suffix.lower())
    if reader is None:
        raise DocumentsError(
            path,
            f"expected a name with .csv or .jsonl, got {path.suffix or 'no suffix'}",
            "Convert or rename the file.",
        )
    texts, labels = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, text, label in reader(path, file):
                texts.append(_checked(path, line, "text", text))
                labels.append(_checked(path, line, "label", label).strip())
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
        raise DocumentsError(path, reason, "Check the path.") from error
    except UnicodeDecodeError as error:
        reason = f"expected UTF-8, got the byte {error.object[error.start]:#04x}"
        raise DocumentsError(path, reason, "Convert the file to UTF-8.") from error
    if not texts:
        raise DocumentsError(
            path, "the file has no documents", "Give documents of at least two labels."
        )
    return Corpus(tuple(texts), tuple(labels))


def _checked(path: Path, line: int, name: str, value: Any) -> str:
    if value is None:
        raise DocumentsError(path, f"there is no {name}", "Give each row text and label.", line)
    if not isinstance(value, str):
        reason = f"{name} must be a string, got {type(value).__name__}"
        raise DocumentsError(path, reason, f"Put the {name} in quotes.", line)
    if not value.strip():
        raise DocumentsError(path, f"{name} is empty", "Fill it in, or remove the row.", line)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        reason = f"{name} has half a surrogate pair, which is not a character"
        raise DocumentsError(path, reason, "Remove the escape sequence.", line) from error
    return value


def _csv_rows(path: Path, file: TextIO) -> Iterator[Row]:
    previous = csv.field_size_limit(_FIELD_LIMIT)  # the default is too small for long documents
    reader, line = csv.reader(file, strict=True), 1
    try:
        columns = next(reader, [])
        if missing := [name for name in ("text", "label") if name not in columns]:
            raise DocumentsError(
                path,
                f"there is no column {' and no column '.join(missing)}",
                "Name the columns text and label in the first line.",
                line,
            )
        line = reader.line_num + 1
        for values in reader:
            if len(values) > len(columns):
                reason = f"expected {len(columns)} values, got {len(values)}"
                raise DocumentsError(path, reason, "Put texts with commas in quotes.", line)
            if values:  # not a blank line
                row = dict(zip(columns, values, strict=False))
                yield line, row.get("text"), row.get("label")
            line = reader.line_num + 1
    except csv.Error as error:
        raise DocumentsError(path, f"invalid CSV ({error})", "Check the quotes.", line) from error
    finally:
        csv.field_size_limit(previous)


def _json_rows(path: Path, file: TextIO) -> Iterator[Row]:
    for line, content in enumerate(file, 1):
        if not content.strip():
            continue
        try:
            row = json.loads(content)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DocumentsError(
                path, f"invalid JSON ({error})", "Write one object per line.", line
            ) from error
        if not isinstance(row, dict):
            raise DocumentsError(
                path,
                f"expected a JSON object, got {type(row).__name__}",
                'Write {"text": "...", "label": "..."}.',
                line,
            )
        yield line, row.get("text"), row.get("label")
