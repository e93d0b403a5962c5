"""The base of heads that answer for every token, of their decoders, and of growing arrays."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aftexport.heads.answer import Answer, Span
from aftexport.heads.head import Double, Head

OpenFile = Callable[[], IO[bytes]]
"""A function that opens a new binary file for reading and writing, such as ``TemporaryFile``."""


def file_opener(folder: Path | None) -> OpenFile:
    """Return a function that opens files without a name; they end with their last user."""

    def open_file() -> IO[bytes]:
        return tempfile.TemporaryFile(dir=folder)

    return open_file


class Column:
    """An array that grows by blocks of rows, in memory or in a file, which ``array`` closes."""

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


Mask = NDArray[np.bool_]
_MAX_NUMBERS = 1 << 18
"""The maximum of logits that are decoded at once: their values in float64 are temporary."""


class TokenResult(ABC):
    """The answer for the tokens of a document, in arrays."""

    def named_spans(self, first: int = 0, last: int | None = None) -> tuple[Span, ...]:
        """Return the spans by their numbers, without the answers for tokens."""
        return ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def answer(self, start: int = 0, end: int | None = None) -> Answer:
        """Return the answer for the tokens from ``start`` to ``end``."""


class Decoder(ABC):
    """The rows of a document's tokens, decoded block by block of any sizes."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._tokens = 0

    def add(self, rows: NDArray[np.floating]) -> None:
        """Decode the rows ``[n, width]`` of the next tokens.

        Raises:
            ValueError: if the rows have another shape.
        """
        if rows.ndim != 2 or rows.shape[1] != self._width:
            raise ValueError(f"expected rows [n, {self._width}], got shape {list(rows.shape)}")
        step = max(1, _MAX_NUMBERS // self._width)
        for first in range(0, len(rows), step):
            block = np.ascontiguousarray(rows[first : first + step], np.float64)
            self._decode(block, self._tokens)
            self._tokens += len(block)

    @abstractmethod
    def _decode(self, rows: Double, first: int) -> None:
        """Decode at least one row; ``first`` is the index of the first row's token."""

    @abstractmethod
    def finish(self) -> TokenResult:
        """Return the result for all rows; no row can be added afterwards."""


class TokenHead(Head):
    """The meaning of an output with a row for every token, ``[batch, tokens, width]``."""

    takes_documents: ClassVar[bool] = False
    """Whether an output with a row for every document fits too."""

    @property
    def is_per_token(self) -> bool:
        """Whether the head answers for every token of a document."""
        return True

    @property
    def needs_words(self) -> bool:
        """Whether a decoder needs the starts of words, which only a text has."""
        return False

    @abstractmethod
    def decoder(
        self,
        starts_word: Mask | None = None,
        *,
        is_special: Mask | None = None,
        open_file: OpenFile | None = None,
    ) -> Decoder:
        """Return a decoder for one document.

        ``starts_word`` tells whether each token starts a word, which only a text has.
        ``is_special`` tells whether the tokenizer added it to the text: no span includes an added
        token.

        Raises:
            InputError: if ``needs_words``, and ``starts_word`` is None.
        """

    def answer(self, logits: Double) -> Answer:
        """Return the answer for the logits ``[tokens, width]`` of one document."""
        decoder = self.decoder()
        decoder.add(logits)
        return decoder.finish().answer()
