"""The held-out documents a model can take whole, and how a classifier does on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from aftexport.demo.corpus import Corpus
from aftexport.demo.tokenizer import encode
from aftexport.errors import UsageError


@dataclass(frozen=True)
class HeldOut:
    """Documents to judge by.

    Attributes:
        corpus: the documents of at most the limit of tokens.
        documents: the token ids of each.
        left_out: number of documents over the limit.
    """

    corpus: Corpus
    documents: list[list[int]]
    left_out: int

    @property
    def longest(self) -> int:
        """Index of the document of most tokens."""
        return max(range(len(self.documents)), key=lambda i: len(self.documents[i]))

    def accuracy(self, answers: Sequence[str]) -> float:
        """Share of the documents whose label is the answer given."""
        pairs = zip(answers, self.corpus.labels, strict=True)
        return sum(answer == label for answer, label in pairs) / len(self.corpus)


def hold_out(test: Corpus, tokenizer: Tokenizer, limit: int) -> HeldOut:
    """Takes the documents of at most ``limit`` tokens.

    Raises:
        UsageError: where there is none.
    """
    documents = encode(tokenizer, test.texts)
    fitting = [i for i, ids in enumerate(documents) if len(ids) <= limit]
    if not fitting:
        raise UsageError(
            f"Every held-out document has more than {limit:,} tokens.",
            "Give shorter documents, or choose a mechanism that takes longer ones.",
        )
    return HeldOut(
        test.take(fitting), [documents[i] for i in fitting], len(documents) - len(fitting)
    )
