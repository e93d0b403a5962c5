"""What is kept of a long document between the parts of its work: in files, that memory not grow."""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]


class Rows:
    """Arrays ``[1, T, C]``, one after another along T, in a file that has no name.

    Args:
        folder: where the file is; the system's for temporary files by default.

    Attributes:
        file: to be closed when nothing is read any more, which removes it.
        count: of the rows.
    """

    def __init__(self, folder: Path | None) -> None:
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed by whoever made it
        self.count = 0
        self._like: Array = np.empty((1, 0, 0))

    def append(self, rows: Array) -> None:
        """Writes rows after the last; raises OSError where there is no space."""
        self._like = rows[:, :0].copy()  # a view would keep all of them
        self.count += rows.shape[1]
        self.file.write(np.ascontiguousarray(rows).data)
        self.file.flush()  # or a full disk would be found only where the file is closed

    def read(self, start: int, end: int) -> Array:
        """The rows from ``start`` to ``end``, ``[1, end - start, C]``."""
        width = self._like.shape[2]
        self.file.seek(start * width * self._like.itemsize)
        rows = np.empty((1, end - start, width), self._like.dtype)
        self.file.readinto(rows.data)
        self.file.seek(0, 2)
        return rows


@dataclass(frozen=True)
class Summary:
    """Keys ``[1, S, *]`` and values ``[1, S, D]`` that stand for the tokens up to ``end``."""

    start: int
    end: int
    keys: Array
    values: Array

    @classmethod
    def of(cls, outputs: Mapping[str, Array], start: int, end: int) -> Self:
        """Copies it: what a runtime returns may keep all of a run's memory."""
        return cls(start, end, outputs["few_keys"].copy(), outputs["few_values"].copy())


class Summaries:
    """Summaries, one after another, in two files.

    Args:
        folder: where the files are; the system's for temporary files by default.
        files: closes them.
    """

    def __init__(self, folder: Path | None, files: ExitStack) -> None:
        self._keys, self._values = Rows(folder), Rows(folder)
        files.enter_context(self._keys.file)
        files.enter_context(self._values.file)
        self._places: list[tuple[int, int, int, int]] = []

    def append(self, summary: Summary) -> int:
        """Writes one more and returns its index; raises OSError where there is no space."""
        first = self._keys.count
        self._keys.append(summary.keys)
        self._values.append(summary.values)
        self._places.append((summary.start, summary.end, first, self._keys.count))
        return len(self._places) - 1

    def tokens(self, index: int) -> tuple[int, int]:
        """The first token that one stands for, and the one after its last."""
        return self._places[index][:2]

    def read(self, index: int) -> Summary:
        """The summary that was the ``index``-th to be written."""
        start, end, first, last = self._places[index]
        return Summary(start, end, self._keys.read(first, last), self._values.read(first, last))
