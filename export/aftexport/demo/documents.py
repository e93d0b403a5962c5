"""Documents of the demo with their tokens, and the targets of a training on parts of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from aftexport.demo.corpus import Corpus
from aftexport.demo.tokenizer import encode


@dataclass(frozen=True)
class Document:
    """A document and its tokens.

    Attributes:
        text: the document.
        label: its label in the corpus.
        ids: the token ids.
        starts: int64 ``[T]``, the first byte of each token in the text's UTF-8.
    """

    text: str
    label: str
    ids: list[int]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    def tokens_at(self, places: Sequence[int]) -> NDArray[np.int64]:
        """Return the index of the token at each byte of the text's UTF-8."""
        return np.searchsorted(self.starts, np.asarray(places, np.int64), "right") - 1

    def excerpt(self, start: int, stop: int) -> str:
        """Return the text of the tokens from ``start`` to ``stop``."""
        first, end = np.append(self.starts, len(self.text.encode()))[[start, stop]]
        return self.text.encode()[first:end].decode(errors="replace")


Tokens = Sequence[int] | NDArray[np.float32]
"""Token ids, or features ``[T, F]``."""


class Tokenized(Protocol):
    """A document as a model sees it."""

    @property
    def ids(self) -> Tokens:
        """The token ids, or the features."""
        ...


class Target(Protocol):
    """The truth about a document, which is known for each part of it."""

    def part(self, start: int, stop: int) -> Tensor:
        """Return the target of the tokens from ``start`` to ``stop``."""
        ...


@dataclass(frozen=True)
class Example:
    """A document to train on.

    Attributes:
        ids: the token ids, or the features.
        target: the target of each part.
    """

    ids: Tokens
    target: Target


def tokenized(tokenizer: Tokenizer, corpus: Corpus) -> list[Document]:
    """Return the documents of a corpus with their tokens.

    Args:
        tokenizer: a tokenizer of ``train_tokenizer``, which has a symbol for each byte.
        corpus: the documents.
    """
    sizes = np.zeros(tokenizer.get_vocab_size(), np.int64)
    for token, token_id in tokenizer.get_vocab().items():
        sizes[token_id] = len(token)
    documents = []
    for ids, text, label in zip(
        encode(tokenizer, corpus.texts), corpus.texts, corpus.labels, strict=True
    ):
        ends = np.cumsum(sizes[ids])
        documents.append(Document(text, label, ids, np.concatenate([[0], ends[:-1]])))
    return documents
