"""The base of heads that answer for every token, and of their decoders."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aftexport.heads.answer import Answer, Span
from aftexport.heads.column import OpenFile
from aftexport.heads.head import Double, Head

Mask = NDArray[np.bool_]
_MAX_NUMBERS = 1 << 18
"""The maximum of logits that are decoded at once: their values in float64 are temporary."""


class TokenResult(ABC):
    """The answer for the tokens of a document, in arrays."""

    def named_spans(self, first: int = 0, last: int | None = None) -> tuple[Span, ...]:
        """Return the spans by their numbers, without the answers for tokens.

        Args:
            first: the number of the first span.
            last: the number of the span after the last; None for the end of the document.
        """
        return ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens."""

    @abstractmethod
    def answer(self, start: int = 0, end: int | None = None) -> Answer:
        """Return the answer for a part of the document.

        Args:
            start: the index of the first token.
            end: the index of the token after the last; None for the end of the document.
        """


class Decoder(ABC):
    """The rows of a document's tokens, decoded block by block.

    The result does not depend on the sizes of the blocks.

    Args:
        width: the number of logits of a token.
    """

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

        Args:
            starts_word: whether each token of the document starts a word; None without a text.
            is_special: whether the tokenizer added each token to the text; None for no such token.
                No span includes an added token.
            open_file: opens files for the values of tokens; None to keep the values in memory.

        Raises:
            InputError: if ``needs_words``, and ``starts_word`` is None.
        """

    def answer(self, logits: Double) -> Answer:
        """Return the answer for the logits ``[tokens, width]`` of one document."""
        decoder = self.decoder()
        decoder.add(logits)
        return decoder.finish().answer()
