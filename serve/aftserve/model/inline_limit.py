"""The limits on answers with a number for each token, which are held until a request ends."""

from collections.abc import Mapping, Sequence

from aftexport.heads import Head
from aftserve.errors import DocumentTooLongError
from aftserve.model.wanted import MAX_EVIDENCE_NUMBERS

MAX_INLINE_TOKENS = 1 << 16
"""Maximum tokens of a document whose answers for tokens are part of one JSON object."""
_MAX_INLINE_NUMBERS = 1 << 20
"""Maximum numbers of such an answer, for heads with many numbers for each token."""
_DOCUMENTS = 4
"""Maximum tokens of a request's documents together, in documents of maximum length."""
_MAX_REQUEST_NUMBERS = _DOCUMENTS * MAX_EVIDENCE_NUMBERS
"""Maximum numbers in the evidence of a request of several documents, in memory: 64 MiB."""

_WITH_PADDING = {False: "", True: " with their padding"}


def numbers_per_token(head: Head) -> int:
    """Return how many numbers the answer of a head has for each token; 0 without any."""
    if not head.is_per_token:
        return 0
    return head.width if "vectors" in head.fields.values() else 1


def max_inline_tokens(heads: Mapping[str, Head]) -> int | None:
    """Return the maximum tokens of a document with an inline answer; None without a limit."""
    numbers = sum(map(numbers_per_token, heads.values()))
    return min(MAX_INLINE_TOKENS, max(1, _MAX_INLINE_NUMBERS // numbers)) if numbers else None


class InlineTokens:
    """The tokens of one request whose answers are part of one JSON object, or of lines of them.

    Args:
        is_padded: whether the answers of documents are padded to the longest.
        explained: number of logits with evidence, which each have a number for each token.
    """

    def __init__(self, *, is_padded: bool = False, explained: int = 0) -> None:
        self._is_padded = is_padded
        self._explained = explained
        self._total = 0
        self._evidence = 0

    def add(self, heads: Mapping[str, Head], lengths: Sequence[int]) -> None:
        """Count the tokens of documents.

        Args:
            heads: heads of the model.
            lengths: tokens of each document.

        Raises:
            DocumentTooLongError: if a document, or the request, has too many for its answer.
        """
        self._add_evidence(lengths)
        limit = max_inline_tokens(heads)
        if limit is None:
            return
        if (longest := max(lengths, default=0)) > limit:
            raise DocumentTooLongError(
                f"An answer for each token in one JSON object must have at most {limit} tokens, "
                f"got {longest}.",
                "Send one document with the header Accept: application/x-ndjson to stream its "
                "answer, or request binary tensors by the Open Inference Protocol.",
            )
        total = self._total + (longest * len(lengths) if self._is_padded else sum(lengths))
        if total > _DOCUMENTS * limit:
            raise DocumentTooLongError(
                f"The answers for each token of a request must have at most {_DOCUMENTS * limit} "
                f"tokens together, got {total}{_WITH_PADDING[self._is_padded]}.",
                "Send the documents in several requests.",
            )
        self._total = total

    def _add_evidence(self, lengths: Sequence[int]) -> None:
        """Count the numbers of the evidence; one document has its own limit."""
        total = self._evidence + self._explained * sum(lengths)
        is_single = not self._evidence and len(lengths) == 1
        if total > _MAX_REQUEST_NUMBERS and not is_single:
            raise DocumentTooLongError(
                f"The evidence of a request must have at most {_MAX_REQUEST_NUMBERS} numbers, one "
                f"for each token and explained logit, got {total}.",
                "Send the documents in several requests, or explain fewer labels or values.",
            )
        self._evidence = total
