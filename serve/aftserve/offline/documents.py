"""Where documents come from: a folder of text files, or Parquet with a column of texts."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset

from aftexport.errors import AftexportError, InputError, UsageError

ROWS = 256
"""Documents of a block: what an actor takes at a time, and again if it dies."""
PATH, TEXT = "path", "text"


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

    Attributes:
        paths: absolute, by name.
    """

    paths: dict[str, str]

    @classmethod
    def find(cls, place: Path) -> "TextFiles":
        """Of a folder, or one file."""
        root = place if place.is_dir() else place.parent
        found = sorted(_files(place)) if place.is_dir() else [place]
        paths = {path.relative_to(root).as_posix(): str(path.absolute()) for path in found}
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
        files = sorted(map(str, _files(place.absolute()))) if place.is_dir() else [str(place)]
        files = [file for file in files if file.endswith(".parquet")]
        try:
            dataset = pyarrow.dataset.dataset(files, format="parquet")
            count = dataset.count_rows()
        except (OSError, ValueError) as error:
            raise UsageError(f"{place}: {error}.", "Check the file.") from error
        names = dataset.schema.names
        id = id or ("id" if "id" in names else None)
        for name in filter(None, (text, id)):
            if names.count(name) != 1:
                raise UsageError(
                    f"{place} has no one column {name!r}; it has {', '.join(names)}.",
                    "Name them by --text and --id.",
                )
        kind = dataset.schema.field(text).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UsageError(f"Column {text!r} of {place} is {kind}.", "Name one of strings.")
        ids = dataset.schema.field(id).type if id is not None else None
        return cls(count, ids, [str(Path(file).absolute()) for file in files], text, id)

    def blocks(self) -> Any:
        """See ``Documents``."""
        import ray

        columns = [name for name in (self.id, self.text) if name is not None]
        dataset = ray.data.read_parquet(self.files, columns=columns)
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
    listed = _files(place) if place.is_dir() else [place]
    parquet = any(path.suffix == ".parquet" for path in listed)
    documents = ParquetTexts.find(place, text, id) if parquet else TextFiles.find(place)
    if documents.count == 0:
        raise UsageError(f"{place} has no documents.", "Check the path.")
    return documents


def texts_of(block: pa.Table) -> Iterator[str | AftexportError]:
    """The text of each document of a block, or why it cannot be read."""
    if PATH in block.column_names:
        yield from map(_read, block[PATH].to_pylist())
        return
    for text in block[TEXT].to_pylist():
        yield text if text is not None else InputError("There is no text.", "Leave the row out.")


def _read(path: str) -> str | AftexportError:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")  # as the server reads plain text
    except OSError as error:
        return InputError(f"The file cannot be read ({error.strerror}).", "Check it.")
    except UnicodeDecodeError as error:
        return InputError(f"The file is not UTF-8 at byte {error.start}.", "Convert it.")


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
