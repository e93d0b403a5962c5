"""The held-out documents within the model's limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from aftexport.demo.documents import Document
from aftexport.errors import UsageError


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents.

    Attributes:
        documents: the documents within the limit of tokens.
        left_out: number of documents over the limit.
    """

    documents: list[Document]
    left_out: int

    @property
    def longest(self) -> Document:
        """The document with the most tokens."""
        return max(self.documents, key=len)

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [document.text for document in self.documents]


def hold_out(documents: Sequence[Document], limit: int) -> HeldOut:
    """Return the documents of at most ``limit`` tokens.

    Raises:
        UsageError: if every document has more tokens.
    """
    fitting = [document for document in documents if len(document) <= limit]
    if not fitting:
        raise UsageError(
            f"Expected held-out documents of at most {limit:,} tokens, got only longer ones.",
            "Give shorter documents, or choose a mechanism for longer ones.",
        )
    return HeldOut(fitting, len(documents) - len(fitting))
