"""Types that every layer of the server shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from aftexport.chunked import document


class Tokens(document.Tokens, Protocol):
    """The tokens of one document, int64 ``[T]`` or normalized features, float32 ``[T, F]``."""

    def tolist(self) -> Any:
        """Return all tokens as a list."""
        ...


ExtraFields = Mapping[str, Any]
"""The extra inputs of one document by name, which are not checked yet."""


@dataclass(frozen=True)
class TextPair:
    """Two texts that are one document, such as a query and a passage."""

    text: str
    text_pair: str

    def __len__(self) -> int:
        """Return the number of characters of both."""
        return len(self.text) + len(self.text_pair)


Text = str | TextPair
Document = Text | Sequence[int] | Sequence[Sequence[float]] | NDArray[Any] | Tokens
"""A text, a pair of texts, or token ids or features that are not checked yet."""


def texts_of(text: Text) -> tuple[str, ...]:
    """Return the one text, or the two texts of a pair."""
    return (text,) if isinstance(text, str) else (text.text, text.text_pair)
