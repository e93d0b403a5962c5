"""Documents for one process, without Ray: files, folders, tables and standard input."""

import csv
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from aftexport.bundle.features import default_names
from aftexport.errors import AftexportError, InputError, UsageError
from aftexport.extra_inputs import TEXT_PAIR
from aftserve.batch.answering import Source
from aftserve.batch.text_files import ARRAY, files_below, read_text, shown, text_in
from aftserve.errors import utf8_remedy
from aftserve.schemas import DocumentRequest
from aftserve.types import ExtraFields, TextPair

STDIN = Path("-")
_SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_PARQUET = ".parquet"
_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_SINGLE = ("text", "features")
"""The formats of files with one document each."""
_MAX_HEADER_BYTES = 1 << 16
"""Maximum length of the line with the names of columns."""
_MAX_CELL_CHARACTERS = 2**31 - 1
_QUOTES = "Put texts with separators, quotes or line breaks in double quotes."


@dataclass(frozen=True)
class Row:
    """A document of the input."""

    id: Any
    """Its path or its id; None if the row of a table has none."""
    document: Source
    inputs: ExtraFields


@dataclass(frozen=True)
class Columns:
    """The names of the columns of tables."""

    text: str = "text"
    id: str | None = None
    """None for the column ``id`` if there is one."""
    others: tuple[str, ...] = ()
    """The extra inputs of the model, and the second text of a pair."""
    features: tuple[str, ...] = ()
    """The features of the model, whose CSV tables are documents with a row for each token."""


@dataclass(frozen=True)
class _File:
    """A file, or standard input."""

    path: Path
    format: str
    count: int | None = None
    """Number of its documents; None if unknown."""

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        if self.path == STDIN:
            yield sys.stdin.buffer
            return
        with self.path.open("rb") as file:
            yield file


@dataclass(frozen=True)
class Rows:
    """The documents of several files, which are read once, as needed."""

    files: Sequence[_File]
    columns: Columns
    max_characters: int

    @property
    def count(self) -> int | None:
        """Number of documents; None if unknown."""
        counts = [file.count for file in self.files]
        return None if None in counts else sum(count or 0 for count in counts)

    @property
    def has_tables(self) -> bool:
        """Whether some documents are rows of tables."""
        return any(file.format not in _SINGLE for file in self.files)

    def __iter__(self) -> Iterator[Row]:
        for file in self.files:
            try:
                yield from _READERS[file.format](file, self.columns, self.max_characters)
            except OSError as error:
                problem = f"The file cannot be read ({error.strerror})."
                yield Row(shown(file.path), InputError(problem, "Check it."), {})


def find(
    places: Sequence[Path], columns: Columns, *, stdin: str = "text", max_characters: int
) -> Rows:
    """Find the documents of files, folders and ``-``; ``stdin`` is the format of the last.

    Raises:
        UsageError: if a place does not exist, or if a table lacks a column.
    """
    files: list[_File] = []
    for place in places:
        if place == STDIN:
            files.append(_file(STDIN, stdin, columns))
            continue
        if not place.exists():
            raise UsageError(f"{place} does not exist.", "Check the path.")
        files += _files_of(place, columns)
    for file in files:
        if file.format in ("csv", "tsv", "features") and file.path != STDIN:
            with file.open() as opened:
                _header(file, opened.readline(_MAX_HEADER_BYTES + 1), columns)
    if not files:
        raise UsageError(f"{places[0]} has no documents.", "Check the path.")
    return Rows(files, columns, max_characters)


def _files_of(place: Path, columns: Columns) -> list[_File]:
    """Return the files of a file or a folder; the tables of a folder of Parquet are one of them."""
    listed = sorted(files_below(place)) if place.is_dir() else [place]
    if any(path.suffix == _PARQUET for path in listed):
        return [_File(place, "parquet", _parquet(place, columns).count)]
    return [_file(path, _SUFFIXES.get(path.suffix.lower(), "text"), columns) for path in listed]


def _file(path: Path, kind: str, columns: Columns) -> _File:
    if columns.features and kind in ("csv", "tsv"):
        kind = "features"
    return _File(path, kind, 1 if kind in _SINGLE else None)


def _texts(file: _File, columns: Columns, max_characters: int) -> Iterator[Row]:
    """Yield the only document of a file, or the path of an array."""
    document: Source
    if file.path != STDIN and file.path.suffix == ARRAY:
        document = file.path
    else:
        document = _text(file, max_characters)
    yield Row(shown(file.path), document, {})


def _text(file: _File, max_characters: int) -> str | AftexportError:
    if file.path != STDIN:
        return read_text(file.path, max_characters)
    with file.open() as opened:
        return text_in(opened, max_characters)


def _features(file: _File, columns: Columns, max_characters: int) -> Iterator[Row]:
    """Yield the only document of a table of features, float64 ``[rows, features]``."""
    document: Source
    text = _text(file, max_characters)
    if isinstance(text, AftexportError):
        document = text
    else:
        header, _, rest = text.partition("\n")
        names, separator = _header(file, header.encode(), columns)
        places = [names.index(name) for name in columns.features]
        values = array("d")
        reader = csv.reader(StringIO(rest, newline=""), delimiter=separator, strict=True)
        try:
            for cells in filter(None, reader):
                values.extend(float(cells[place]) for place in places)
            document = np.array(values).reshape(-1, len(places))
        except (ValueError, IndexError, csv.Error) as error:
            is_short = isinstance(error, IndexError)
            said = "too few columns" if is_short else str(error).partition("float: ")[2] or error
            document = InputError(
                f"{shown(file.path)}, line {reader.line_num + 1}: expected a number for each of "
                f"{', '.join(columns.features)[:200]}, got {said}.",
                "Write numbers with a decimal point, such as 20.5, in every row.",
            )
    yield Row(shown(file.path), document, {})


def _lines(file: _File, columns: Columns, max_characters: int) -> Iterator[Row]:
    """Yield the documents of JSON lines."""
    with file.open() as opened:
        for number, line in enumerate(opened, 1):
            if line := line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
                yield _row(file, number, line, columns)


def _row(file: _File, number: int, line: bytes, columns: Columns) -> Row:
    place, id = f"{shown(file.path)}, line {number}", None
    try:
        content = from_json(line, allow_inf_nan=False)
        if not isinstance(content, dict):
            raise ValueError("expected an object")
        id = content.get(columns.id or "id")
        if columns.id is not None and id is None:
            raise ValueError(f"expected the field {columns.id!r} of --id")
        others = (TEXT_PAIR, "input_ids", "input_features", "inputs")
        names = {"text": columns.text, **{name: name for name in others}}
        given = {field: content[name] for field, name in names.items() if name in content}
        request = DocumentRequest.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        loc = ".".join(map(str, first["loc"]))
        said = f"{loc}: {first['msg']}" if loc else first["msg"].removeprefix("Value error, ")
        return Row(id, InputError(f"{place}: {said}.", "Correct the line."), {})
    except ValueError as error:
        remedy = f'Write an object such as {{"{columns.text}": "..."}} on each line.'
        return Row(id, InputError(f"{place}: {error}.", remedy), {})
    return Row(id, request.document, request.inputs or {})


def _table(file: _File, columns: Columns, max_characters: int) -> Iterator[Row]:
    """Yield the documents of a table with a line of names; see ``_header``."""
    with file.open() as opened:
        names, separator = _header(file, opened.readline(_MAX_HEADER_BYTES + 1), columns)
        # Bytes that are not UTF-8 fail only their own row.
        text = TextIOWrapper(opened, "utf-8", "surrogateescape", newline="")
        before = csv.field_size_limit(_MAX_CELL_CHARACTERS)
        reader = csv.reader(text, delimiter=separator, strict=True)
        try:
            for values in reader:
                if values:  # not a blank line
                    place = f"{shown(file.path)}, line {reader.line_num + 1}"
                    yield _table_row(place, names, values, columns)
        except csv.Error as error:
            place = f"{shown(file.path)}, line {reader.line_num + 1}"
            yield Row(None, InputError(f"{place}: invalid CSV ({error}).", _QUOTES), {})
        finally:
            csv.field_size_limit(before)
            text.detach()


def _table_row(place: str, names: Sequence[str], values: Sequence[str], columns: Columns) -> Row:
    if len(values) != len(names):
        said = f"{place}: expected {len(names)} values, got {len(values)}."
        return Row(None, InputError(said, _QUOTES), {})
    cells = dict(zip(names, values, strict=True))
    id = cells.get(columns.id or "id")
    texts = [cells[columns.text], *(cells[n] for n in columns.others if n == TEXT_PAIR)]
    try:
        "".join(texts).encode()
        inputs = {n: _number(n, cells[n]) for n in columns.others if n != TEXT_PAIR}
    except UnicodeEncodeError:
        remedy = "Convert the file to UTF-8: iconv -f latin1 -t utf-8 does so for Latin-1."
        return Row(id, InputError(f"{place}: the text is not UTF-8.", remedy), {})
    except ValueError as error:
        return Row(id, InputError(f"{place}: {error}.", "Correct the value."), {})
    return Row(id, TextPair(*texts) if len(texts) == 2 else texts[0], inputs)


def _number(name: str, cell: str) -> Any:
    """Return the number, or the list of numbers in JSON, in a cell; None for an empty one."""
    try:
        return json.loads(cell) if cell else None
    except ValueError as error:
        raise ValueError(f"expected a number or [...] in column {name!r}, got {cell[:40]!r}") from (
            error
        )


def _header(file: _File, line: bytes, columns: Columns) -> tuple[list[str], str]:
    """Return the names of the columns, and the separator with which they are found.

    Raises:
        UsageError: if a column is missing.
    """
    place = shown(file.path)
    if len(line) > _MAX_HEADER_BYTES:
        raise UsageError(
            f"{place} must begin with a line of names of at most {_MAX_HEADER_BYTES:,} bytes.",
            "Name the columns in the first line.",
        )
    try:
        first = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{place} is not UTF-8 at byte {error.start}.", utf8_remedy(line)
        ) from error
    of_texts = [columns.text, *([columns.id] if columns.id else []), *columns.others]
    needed = list(columns.features) or of_texts
    separators = "\t" if file.format == "tsv" else _SEPARATORS
    found = {one: next(csv.reader([first], delimiter=one), []) for one in separators}
    for separator, names in found.items():
        if all(names.count(name) == 1 for name in needed):
            return names, separator
        # A bundle without names of its features takes as many columns in their order.
        is_unnamed = columns.features == default_names(len(names))
        if is_unnamed and not any(map(_is_number, names)):
            return needed, separator
    separator, names = max(found.items(), key=lambda one: len(one[1]))
    missing = next(name for name in needed if names.count(name) != 1)
    raise UsageError(
        f"{place} must have one column {missing!r}, got {', '.join(names)[:200]!r} (separated by "
        f"{_SEPARATORS[separator]}).",
        "Name the features in the first line, as aftexport inspect shows them."
        if columns.features
        else "Name the column in the first line, or by --text and --id.",
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _parquet(place: Path, columns: Columns) -> Any:
    # pyarrow is needed by Parquet only.
    from aftserve.batch.documents import ParquetTexts

    return ParquetTexts.find(place, columns.text, columns.id).with_inputs(columns.others)


def _parquet_rows(file: _File, columns: Columns, max_characters: int) -> Iterator[Row]:
    """Yield the documents of a Parquet file or folder."""
    from pyarrow import ArrowException

    from aftserve.batch.documents import fields_of, texts_of
    from aftserve.batch.output import json_ids

    try:
        for block in _parquet(file.path, columns).tables():
            has_ids = "id" in block.column_names
            ids = json_ids(block["id"]) if has_ids else [None] * len(block)
            texts = texts_of(block, max_characters)
            yield from map(Row, ids, texts, fields_of(block))
    except ArrowException as error:
        yield Row(None, InputError(f"{shown(file.path)}: {error}.", "Check the file."), {})


_Reader = Callable[[_File, Columns, int], Iterator[Row]]
_READERS: Mapping[str, _Reader] = {
    "text": _texts,
    "csv": _table,
    "tsv": _table,
    "features": _features,
    "jsonl": _lines,
    "parquet": _parquet_rows,
}
