"""Files for the values of a long document between the parts of its run, to bound memory."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aftexport.errors import EngineError, StorageError

Array = NDArray[np.generic]

_VALUES = "values between layers"


@contextmanager
def storing(values: str) -> Iterator[None]:
    """Raise StorageError if the values of a document cannot be stored."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"The {values} of a document cannot be stored ({error.strerror}).",
            "Free some space, name another folder by --spill, or send shorter documents.",
        ) from error


class Rows:
    """Arrays ``[1, T, C]``, joined along T in a file without a name, which its close removes.

    Raises:
        StorageError: if the folder takes no file.
    """

    @storing(_VALUES)
    def __init__(self, folder: Path | None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by the caller
        self.count = 0
        self._like: Array = np.empty((1, 0, 0))

    @storing(_VALUES)
    def append(self, rows: Array) -> None:
        """Append rows to the file; raise StorageError if there is not enough space."""
        self._like = rows[:, :0].copy()  # a view would keep all rows in memory
        self.count += rows.shape[1]
        self.file.write(np.ascontiguousarray(rows).data)
        self.file.flush()  # otherwise a full disk would be noticed only on close

    @storing(_VALUES)
    def read(self, start: int, end: int) -> Array:
        """Return the rows from ``start`` to ``end``, ``[1, end - start, C]``.

        Raises:
            EngineError: if there are fewer rows.
            StorageError: if the file cannot be read.
        """
        if end > self.count:
            raise EngineError(
                f"Expected {end} rows of a value between layers, got {self.count}.",
                "Export the model again.",
            )
        width = self._like.shape[2]
        self.file.seek(start * width * self._like.itemsize)
        rows = np.empty((1, end - start, width), self._like.dtype)
        self.file.readinto(rows.data)
        self.file.seek(0, 2)
        return rows


@dataclass(frozen=True)
class Summary:
    """Keys ``[1, S, *]`` and values ``[1, S, D]`` for the tokens from ``start`` to ``end``."""

    start: int
    end: int
    keys: Array
    values: Array

    @classmethod
    def of(cls, outputs: Mapping[str, Array], start: int, end: int) -> Self:
        """Return a summary with copies of outputs, which may hold all memory of a run."""
        return cls(start, end, outputs["few_keys"].copy(), outputs["few_values"].copy())


class Summaries:
    """A sequence of summaries in two files, which a stack closes."""

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._keys, self._values = Rows(folder), Rows(folder)
        files.enter_context(self._keys.file)
        files.enter_context(self._values.file)
        self._places: list[tuple[int, int, int, int]] = []

    def append(self, summary: Summary) -> int:
        """Append a summary and return its index."""
        first = self._keys.count
        self._keys.append(summary.keys)
        self._values.append(summary.values)
        self._places.append((summary.start, summary.end, first, self._keys.count))
        return len(self._places) - 1

    def tokens(self, index: int) -> tuple[int, int]:
        """Return the first token of a summary, and the token after its last."""
        return self._places[index][:2]

    def read(self, index: int) -> Summary:
        """Return the summary with an index of ``append``."""
        start, end, first, last = self._places[index]
        return Summary(start, end, self._keys.read(first, last), self._values.read(first, last))


class States:
    """A stack of states of one shape in a file, the last one first."""

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._rows = Rows(folder)
        files.enter_context(self._rows.file)

    def push(self, state: Array) -> None:
        """Append a state."""
        self._rows.append(state.reshape(1, 1, -1))

    def read(self, depth: int, shape: tuple[int, ...]) -> Array:
        """Return the state below ``depth`` others, in a shape."""
        place = self._rows.count - 1 - depth
        return self._rows.read(place, place + 1).reshape(shape)
