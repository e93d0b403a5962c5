"""The held-out documents within the model's limit, and the accuracy on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from aftexport.demo.corpus import Corpus
from aftexport.demo.tokenizer import encode
from aftexport.errors import UsageError


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents.

    Attributes:
        corpus: the documents within the limit of tokens.
        documents: the token ids of each document.
        left_out: number of documents over the limit.
    """

    corpus: Corpus
    documents: list[list[int]]
    left_out: int

    @property
    def longest(self) -> int:
        """The index of the document with the most tokens."""
        return max(range(len(self.documents)), key=lambda i: len(self.documents[i]))

    def accuracy(self, answers: Sequence[str]) -> float:
        """Return the share of documents whose label equals the answer."""
        pairs = zip(answers, self.corpus.labels, strict=True)
        return sum(answer == label for answer, label in pairs) / len(self.corpus)


def hold_out(test: Corpus, tokenizer: Tokenizer, limit: int) -> HeldOut:
    """Return the documents of at most ``limit`` tokens.

    Raises:
        UsageError: if every document has more tokens.
    """
    documents = encode(tokenizer, test.texts)
    fitting = [i for i, ids in enumerate(documents) if len(ids) <= limit]
    if not fitting:
        raise UsageError(
            f"Expected held-out documents of at most {limit:,} tokens, got only longer ones.",
            "Give shorter documents, or choose a mechanism for longer ones.",
        )
    return HeldOut(
        test.take(fitting), [documents[i] for i in fitting], len(documents) - len(fitting)
    )
