"""The normalized features of one document, in memory or, for a large one, in a file."""

import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.features import Features
from aftexport.chunked.document import Rows
from aftexport.errors import InputError
from aftserve.errors import BusyError

_MAX_HELD_BYTES = 1 << 20
"""Maximum bytes of a document in memory; larger ones are kept in files."""
_SEND_NUMBERS = "Send numbers in the range of float32."


class FeatureSpace:
    """The space for the files of all documents.

    Args:
        folder: folder of the files; None for that of the system.
        max_bytes: maximum size of all files together.
    """

    def __init__(self, folder: Path | None, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def open(self, size: int) -> Rows:
        """Return an empty file for ``size`` bytes, whose space is given back with the file.

        Raises:
            BusyError: if the files of other documents leave too little space.
            StorageError: if the file cannot be made.
        """
        if self.used_bytes + size > self.max_bytes:
            raise BusyError("Too many large documents are held.", "Try again later.", 1)
        rows = Rows(self.folder)
        self.used_bytes += size
        weakref.finalize(rows, self._close, rows.file, size)
        return rows

    def _close(self, file: IO[bytes], size: int) -> None:
        file.close()
        self.used_bytes -= size


class FeatureTokens:
    """The normalized features of one document, float32 ``[T, F]``; one thread may read at a time.

    Args:
        rows: the features, as an array or in a file.
    """

    def __init__(self, rows: NDArray[np.float32] | Rows) -> None:
        self._rows = rows

    @classmethod
    def of(cls, values: Any, features: Features) -> "FeatureTokens":
        """Return the normalized features of values in memory.

        Args:
            values: lists of numbers, or an array of floating-point numbers.
            features: features of the model.

        Raises:
            InputError: if they are not finite numbers ``[T, F]``.
        """
        if not isinstance(values, np.ndarray):
            values = _array(values, features)
        if values.ndim != 2 or values.shape[1] != features.count:
            raise InputError(
                f"The features must have the shape [tokens, {features.count}], got "
                f"{list(values.shape)}.",
                f"Send {features.count} numbers for each token.",
            )
        return cls(_normalized(values, features, 0))

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._rows.count if isinstance(self._rows, Rows) else len(self._rows)

    def __getitem__(self, tokens: slice, /) -> NDArray[np.float32]:
        """Return the features of consecutive tokens, ``[n, F]``."""
        if not isinstance(self._rows, Rows):
            return self._rows[tokens]
        start, end, _ = tokens.indices(len(self))
        return np.asarray(self._rows.read(start, max(start, end))[0], np.float32)

    def tolist(self) -> list[list[float]]:
        """Return all features as lists."""
        numbers: list[list[float]] = self[:].tolist()
        return numbers


class FeatureWriter:
    """The features of one document that arrives in parts, which are normalized at once.

    Args:
        features: features of the model.
        tokens: number of tokens of the document.
        space: space for files.

    Raises:
        BusyError: if the files of other documents leave too little space.
        StorageError: if the file cannot be made.
    """

    def __init__(self, features: Features, tokens: int, space: FeatureSpace) -> None:
        self._features = features
        self._count = 0
        size = 4 * tokens * features.count
        self._file = space.open(size) if size > _MAX_HELD_BYTES else None
        held = 0 if self._file is not None else tokens
        self._held = np.empty((held, features.count), np.float32)

    def add(self, values: NDArray[Any]) -> None:
        """Normalize and keep the values of the next tokens, ``[n, F]``.

        Raises:
            InputError: if a value is not finite.
            StorageError: if the disk is full.
        """
        rows = _normalized(values, self._features, self._count)
        if self._file is None:
            self._held[self._count : self._count + len(rows)] = rows
        else:
            self._file.append(rows[None])
        self._count += len(rows)

    def finish(self) -> FeatureTokens:
        """Return the document, after its last token."""
        return FeatureTokens(self._held if self._file is None else self._file)


def _array(values: Any, features: Features) -> NDArray[np.float64]:
    """Return lists of numbers as an array."""
    for token, row in enumerate(values):
        is_list = isinstance(row, list | np.ndarray)
        if not is_list or len(row) != features.count:
            found = f"{len(row)} values" if is_list else type(row).__name__
            raise InputError(
                f"Token {token} must be a list of {features.count} numbers, got {found}.",
                f"Send {features.count} numbers for each token.",
            )
        # bool is a subclass of int, and an array would convert it.
        is_plain = isinstance(row, np.ndarray) or {int, float}.issuperset(map(type, row))
        if not is_plain:
            raise InputError(f"Token {token} must hold only numbers.", "Send numbers.")
    try:
        return np.array(values, np.float64).reshape(len(values), features.count)
    except OverflowError:
        raise InputError("A feature is outside the range of float32.", _SEND_NUMBERS) from None


def _normalized(values: NDArray[Any], features: Features, first: int) -> NDArray[np.float32]:
    try:
        return features.normalized(values, first=first)
    except ValueError as error:
        raise InputError(f"The document must have {error}.", _SEND_NUMBERS) from None
