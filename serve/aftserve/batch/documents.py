"""Where documents come from: a folder of text files, or Parquet with a column of texts."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from aftexport.errors import AftexportError, InputError, UsageError
from aftserve.errors import DocumentTooLongError

ROWS = 256
"""Documents of a block: what an actor takes at a time, and again if it dies."""
PATH, TEXT = "path", "text"
_TABLES = (".csv", ".jsonl", ".ndjson", ".tsv")
"""Whoever names such a file means its rows."""
_MOST_BYTES = 4
"""Of a character in UTF-8."""


@dataclass(frozen=True)
class Documents:
    """Documents that can be read on every node.

    Attributes:
        count: how many there are.
        ids: type of what names each; None where that is its number.
    """

    count: int
    ids: pa.DataType | None

    def blocks(self) -> Any:
        """A Ray dataset of them, in order: columns ``id`` and ``path`` or ``text``."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextFiles(Documents):
    """Every file below a folder, but hidden ones; named by its path from there.

    What is not UTF-8 in a name stands in it as ``\\x`` and two digits.

    Attributes:
        paths: absolute, by name.
    """

    paths: dict[str, bytes]

    @classmethod
    def find(cls, place: Path) -> "TextFiles":
        """Of a folder, or one file."""
        root = place if place.is_dir() else place.parent
        found = sorted(_files(place)) if place.is_dir() else [place]
        paths = {_shown(path.relative_to(root)): os.fsencode(path.absolute()) for path in found}
        return cls(len(paths), pa.string(), paths)

    def blocks(self) -> Any:
        """See ``Documents``."""
        import ray

        table = pa.table({"id": list(self.paths), PATH: list(self.paths.values())})
        return ray.data.from_arrow(
            [table.slice(start, ROWS) for start in range(0, len(table), ROWS)]
        )


@dataclass(frozen=True)
class ParquetTexts(Documents):
    """A column of one Parquet file, or of those below a folder in the order of their names.

    Attributes:
        files: absolute paths.
        text: the column of texts.
        id: the column that names them.
    """

    files: list[str]
    text: str
    id: str | None

    @classmethod
    def find(cls, place: Path, text: str, id: str | None) -> "ParquetTexts":
        """Of a file or folder; where ``id`` is None, that is the column ``id`` if there is one.

        Raises:
            UsageError: where they cannot be read, or have no such column of texts.
        """
        files = [place.absolute()] if not place.is_dir() else sorted(_files(place.absolute()))
        tables = [str(path) for path in files if path.suffix == ".parquet"]
        _check_all_is_parquet(place, files)
        try:
            dataset = pyarrow.dataset.dataset(tables, format="parquet")
            count = dataset.count_rows()
            schemas = {part.path: part.physical_schema for part in dataset.get_fragments()}
        except (OSError, ValueError) as error:
            raise UsageError(f"{place}: {error}.", "Check the file.") from error
        if id is None and "id" in dataset.schema.names and text != "id":
            id = "id"
        if id == text:
            raise UsageError(f"--text and --id are both {text!r}.", "Name two columns.")
        for path, schema in schemas.items():
            _check_columns(path, schema, [text] if id is None else [text, id])
            kind = schema.field(text).type
            if not _is_of_texts(kind):
                raise UsageError(f"Column {text!r} of {path} is {kind}.", "Name one of strings.")
        kinds = {schema.field(id).type: path for path, schema in schemas.items() if id is not None}
        if len(kinds) > 1:
            said = ", ".join(f"{kind} in {path}" for kind, path in kinds.items())
            raise UsageError(f"Column {id!r} is {said}.", "Give it one type.")
        return cls(count, next(iter(kinds), None), tables, text, id)

    def blocks(self) -> Any:
        """See ``Documents``."""
        import ray

        columns = [name for name in (self.id, self.text) if name is not None]
        dataset = ray.data.read_parquet(
            self.files,
            columns=columns,
            partitioning=None,  # what the name of a folder says must not replace a column
        )
        names = {self.text: TEXT} | ({self.id: "id"} if self.id is not None else {})
        return dataset.rename_columns(names).repartition(target_num_rows_per_block=ROWS)


def find(place: Path, *, text: str, id: str | None) -> Documents:
    """The documents at a place: of Parquet where there is any, else every file is one.

    Args:
        place: a file or folder.
        text, id: columns of Parquet.

    Raises:
        UsageError: where there are none.
    """
    if not place.exists():
        raise UsageError(f"{place} does not exist.", "Check the path.")
    if place.is_file() and place.suffix in _TABLES:
        raise UsageError(
            f"{place} would be one document, not one for each of its rows.",
            "Convert it to Parquet.",
        )
    listed = _files(place) if place.is_dir() else [place]
    parquet = any(path.suffix == ".parquet" for path in listed)
    documents = ParquetTexts.find(place, text, id) if parquet else TextFiles.find(place)
    if documents.count == 0:
        raise UsageError(f"{place} has no documents.", "Check the path.")
    return documents


def texts_of(block: pa.Table, most_characters: int) -> Iterator[str | AftexportError]:
    """The text of each document of a block, or why it cannot be read; each as it is asked for.

    Args:
        block: of a dataset of ``Documents``.
        most_characters: of a text; a file that has more is not read.
    """
    if PATH in block.column_names:
        for path in block[PATH]:
            yield _read(path.as_py(), most_characters)
        return
    for cell in block[TEXT]:
        yield _text(cell)


def _text(cell: pa.Scalar) -> str | AftexportError:
    try:
        text: str | None = cell.as_py()
    except UnicodeDecodeError as error:  # nothing sees to it in Parquet
        return InputError(f"The text is not UTF-8 at byte {error.start}.", "Convert it.")
    return text if text is not None else InputError("There is no text.", "Leave the row out.")


def _read(path: bytes, most_characters: int) -> str | AftexportError:
    most = _MOST_BYTES * most_characters
    try:
        with Path(os.fsdecode(path)).open("rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            return DocumentTooLongError(
                f"The file has more than {most} bytes, a text at most {most_characters} "
                "characters.",
                "Leave it out.",
            )
        return content.decode("utf-8-sig")  # as the server reads plain text
    except OSError as error:
        return InputError(f"The file cannot be read ({error.strerror}).", "Check it.")
    except UnicodeDecodeError as error:
        return InputError(f"The file is not UTF-8 at byte {error.start}.", "Convert it.")


def _check_all_is_parquet(place: Path, files: Sequence[Path]) -> None:
    """Refuses other files, but those of the system that wrote the table, whose names have a _."""
    for path in files:
        parts = path.relative_to(place.absolute()).parts
        if path.suffix != ".parquet" and not any(part.startswith("_") for part in parts):
            raise UsageError(
                f"{place} has Parquet and other files, such as {Path(*parts)}.",
                "Name a folder of one kind.",
            )


def _check_columns(path: str, schema: pa.Schema, columns: Sequence[str]) -> None:
    for name in columns:
        if schema.names.count(name) != 1:
            raise UsageError(
                f"{path} has no one column {name!r}; it has {', '.join(schema.names)}.",
                "Name them by --text and --id.",
            )


def _is_of_texts(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # what pandas calls a category
        kind = kind.value_type
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_of(kind) for is_of in strings)


def _shown(path: Path) -> str:
    return os.fsencode(path.as_posix()).decode("utf-8", "backslashreplace")


def _files(folder: Path) -> Iterator[Path]:
    """The files below a folder, and links to nothing or to a folder, which are not left out unsaid.

    Raises:
        UsageError: where a folder cannot be read.
    """
    for place, folders, names in os.walk(folder, onerror=_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(place, name) for name in (*folders, *names)):
            nowhere = path.is_symlink() and (path.is_dir() or not path.exists())
            if (path.is_file() or nowhere) and not path.name.startswith("."):
                yield path


def _unreadable(error: OSError) -> None:
    raise UsageError(f"{error.filename} cannot be read ({error.strerror}).", "Check it.")
