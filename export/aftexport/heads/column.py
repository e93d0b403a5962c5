"""An array that grows by blocks of rows, in memory or in a file."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

OpenFile = Callable[[], IO[bytes]]
"""A function that opens a new binary file for reading and writing, such as ``TemporaryFile``."""


def file_opener(folder: Path | None) -> OpenFile:
    """Return a function that opens files without a name; they end with their last user.

    Args:
        folder: folder of the files; None for that of the system.
    """

    def open_file() -> IO[bytes]:
        return tempfile.TemporaryFile(dir=folder)

    return open_file


class Column:
    """An array that grows by blocks of rows.

    Args:
        dtype: the type of its numbers.
        shape: the shape of a row.
        open_file: opens a file for its rows, which ``array`` closes; None to keep them in memory.
    """

    def __init__(
        self, dtype: DTypeLike, shape: tuple[int, ...] = (), open_file: OpenFile | None = None
    ) -> None:
        self._dtype, self._shape = np.dtype(dtype), shape
        self._file = open_file() if open_file is not None else None
        self._bytes = bytearray()

    def add(self, rows: NDArray[Any]) -> None:
        """Append rows ``[n, *shape]``."""
        block = np.ascontiguousarray(rows, self._dtype).data.cast("B") if rows.size else b""
        if self._file is None:
            self._bytes += block
        else:
            self._file.write(block)

    def array(self) -> NDArray[Any]:
        """Return all rows without a copy; no row can be added afterwards."""
        flat: NDArray[Any] = np.frombuffer(self._bytes, self._dtype)
        if self._file is not None:
            with self._file:  # the mapping outlives it
                if self._file.tell():  # an empty file cannot be mapped
                    self._file.flush()
                    flat = np.memmap(self._file, self._dtype, mode="r")
        return flat.reshape(-1, *self._shape)
