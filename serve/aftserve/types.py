"""Types that every layer of the server shares."""

from collections.abc import Mapping, Sequence
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
Document = str | Sequence[int] | Sequence[Sequence[float]] | NDArray[Any] | Tokens
"""A text, or token ids or features that are not checked yet."""
