"""The input: a folder of text files and arrays, or Parquet with a column of texts."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from aftexport.errors import AftexportError, InputError, UsageError
from aftexport.extra_inputs import TEXT_PAIR
from aftserve.batch.text_files import ARRAY, files_below, read_text, shown
from aftserve.types import Text, TextPair

ROWS = 256
"""Documents of a block. An actor takes one block at a time, and repeats it after a restart."""
PATH, TEXT = "path", "text"
INPUT = "input:"
"""Start of the name of a column with an extra input."""
_TABLES = (".csv", ".jsonl", ".ndjson", ".tsv")
"""Suffixes of tables whose rows, not whole files, are the user's documents."""


@dataclass(frozen=True)
class Documents:
    """Documents that can be read on every node."""

    count: int
    ids: pa.DataType | None
    """Type of their ids; None if they are numbered."""

    def blocks(self) -> Any:
        """Return a Ray dataset in order: ``id``, ``path`` or ``text``, and ``INPUT`` columns."""
        raise NotImplementedError

    def with_inputs(self, names: Sequence[str]) -> Self:
        """Return the same documents with columns of the model's extra inputs."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextFiles(Documents):
    """All files below a folder except hidden ones; their ids are the paths from there."""

    # Bytes of a path that are not UTF-8 become ``\x`` and two digits.

    paths: dict[str, bytes]

    def with_inputs(self, names: Sequence[str]) -> Self:
        """See ``Documents``."""
        if names:
            raise UsageError(
                f"Expected a column for each input of the model, {', '.join(names)}, got files.",
                "Write the documents to Parquet, with a column for each input.",
            )
        return self

    @classmethod
    def find(cls, place: Path) -> "TextFiles":
        """Find the files of a folder, or one file."""
        root = place if place.is_dir() else place.parent
        found = sorted(files_below(place)) if place.is_dir() else [place]
        paths = {shown(path.relative_to(root)): os.fsencode(path.absolute()) for path in found}
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
    """A column of one Parquet file, or of all below a folder in the order of their names."""

    files: list[str]
    text: str
    id: str | None
    inputs: tuple[str, ...] = ()

    @classmethod
    def find(cls, place: Path, text: str, id: str | None) -> "ParquetTexts":
        """Find the tables of a file or folder; ``id`` defaults to the column ``id``, if any."""
        files = [place.absolute()] if not place.is_dir() else sorted(files_below(place.absolute()))
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
            raise UsageError(
                f"--text and --id must be two columns, got {text!r} twice.", "Change one of them."
            )
        for path, schema in schemas.items():
            columns = [text] if id is None else [text, id]
            _check_columns(path, schema, columns, remedy="Name them by --text and --id.")
            _check_texts(path, text, schema, "Name another column by --text.")
        kinds = {schema.field(id).type: path for path, schema in schemas.items() if id is not None}
        if len(kinds) > 1:
            said = ", ".join(f"{kind} in {path}" for kind, path in kinds.items())
            raise UsageError(
                f"Column {id!r} must have one type, got {said}.", "Convert the files to one type."
            )
        return cls(count, next(iter(kinds), None), tables, text, id)

    def with_inputs(self, names: Sequence[str]) -> Self:
        """See ``Documents``."""
        for path in self.files:
            _check_columns(
                path,
                pq.read_schema(path),
                names,
                remedy="Write a column for each extra input of the model.",
            )
        if TEXT_PAIR in names:
            for path in self.files:
                _check_texts(path, TEXT_PAIR, pq.read_schema(path), "Write texts to it.")
        if clash := next((name for name in names if name in (self.text, self.id)), None):
            raise UsageError(
                f"Column {clash!r} is an input of the model, got it for --text or --id too.",
                "Name other columns by --text and --id.",
            )
        return replace(self, inputs=tuple(names))

    def blocks(self) -> Any:
        """See ``Documents``."""
        import ray

        names = self._names
        dataset = ray.data.read_parquet(
            self.files,
            columns=[*names],
            partitioning=None,  # the names of folders must not replace a column
        )
        return dataset.rename_columns(names).repartition(target_num_rows_per_block=ROWS)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the blocks in this process, without Ray."""
        names = self._names
        for path in self.files:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS, columns=[*names]):
                    chosen = pa.Table.from_batches([batch]).select([*names])
                    yield chosen.rename_columns([*names.values()])

    @property
    def _names(self) -> dict[str, str]:
        """The names in the blocks of the columns to read."""
        names = {self.text: TEXT} | ({self.id: "id"} if self.id is not None else {})
        return names | {name: f"{INPUT}{name}" for name in self.inputs}


def find(place: Path, *, text: str | None, id: str | None) -> Documents:
    """Find the documents: the rows of Parquet files, or every file if there are none."""
    if not place.exists():
        raise UsageError(f"{place} does not exist.", "Check the path.")
    if place.is_file() and place.suffix in _TABLES:
        raise UsageError(
            f"A table of documents must be Parquet, got {place}.",
            "Convert it to Parquet, or give it to aftserve predict.",
        )
    listed = files_below(place) if place.is_dir() else [place]
    parquet = any(path.suffix == ".parquet" for path in listed)
    if not parquet and (text is not None or id is not None):
        option = "--text" if text is not None else "--id"
        raise UsageError(
            f"{option} names a column of Parquet, got {place} with files of single documents.",
            f"Leave {option} out.",
        )
    documents = ParquetTexts.find(place, text or TEXT, id) if parquet else TextFiles.find(place)
    if documents.count == 0:
        raise UsageError(f"{place} has no documents.", "Check the path.")
    return documents


def texts_of(block: pa.Table, max_characters: int) -> Iterator[Text | Path | AftexportError]:
    """Yield each text or pair of a block, the path of a .npy file, or the error."""
    # A file of more than ``max_characters`` is not read.
    if PATH in block.column_names:
        for cell in block[PATH]:
            path = Path(os.fsdecode(cell.as_py()))
            yield path if path.suffix == ARRAY else read_text(path, max_characters)
        return
    if (second := f"{INPUT}{TEXT_PAIR}") not in block.column_names:
        yield from map(_text, block[TEXT])
        return
    for pair in zip(map(_text, block[TEXT]), map(_text, block[second]), strict=True):
        error = next((one for one in pair if isinstance(one, AftexportError)), None)
        yield error or TextPair(*map(str, pair))


def fields_of(block: pa.Table) -> Iterator[dict[str, Any]]:
    """Yield the extra inputs of each document of a block; None for a missing one."""
    own = f"{INPUT}{TEXT_PAIR}"  # of the document itself
    columns = [name for name in block.column_names if name.startswith(INPUT) and name != own]
    for row in range(len(block)):
        yield {name.removeprefix(INPUT): _value(block[name][row]) for name in columns}


def _value(cell: pa.Scalar) -> Any:
    """Return a number, or an array of a list; None for null, and other values as they are."""
    if not cell.is_valid:
        return None
    if isinstance(cell, pa.DictionaryScalar | pa.ExtensionScalar):
        return _value(cell.value)
    if _is_of_numbers(cell.type):
        return cell.as_py()
    if isinstance(cell, pa.ListScalar) and _is_of_numbers(cell.type.value_type):
        # A list of Python would have an object for each token.
        return cell.values.to_numpy(zero_copy_only=False)
    return cell


def _is_of_numbers(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _text(cell: pa.Scalar) -> str | AftexportError:
    try:
        text: str | None = cell.as_py()
    except UnicodeDecodeError as error:  # Parquet does not check strings
        return InputError(f"The text is not UTF-8 at byte {error.start}.", "Convert it.")
    return text if text is not None else InputError("The row has no text.", "Leave the row out.")


def _check_all_is_parquet(place: Path, files: Sequence[Path]) -> None:
    """Refuse other files, except those that begin with _ and belong to the table's writer."""
    for path in files:
        parts = path.relative_to(place.absolute()).parts
        if path.suffix != ".parquet" and not any(part.startswith("_") for part in parts):
            raise UsageError(
                f"{place} has Parquet and other files, such as {Path(*parts)}.",
                "Name a folder of one kind.",
            )


def _check_columns(path: str, schema: pa.Schema, columns: Sequence[str], *, remedy: str) -> None:
    for name in columns:
        if schema.names.count(name) != 1:
            raise UsageError(
                f"{path} must have one column {name!r}, got {', '.join(schema.names)}.",
                remedy,
            )


def _check_texts(path: str, column: str, schema: pa.Schema, remedy: str) -> None:
    if not _is_of_texts(kind := schema.field(column).type):
        raise UsageError(f"Column {column!r} of {path} must hold strings, got {kind}.", remedy)


def _is_of_texts(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):  # a category of pandas
        kind = kind.value_type
    strings = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_of(kind) for is_of in strings)
