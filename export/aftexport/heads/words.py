"""The labels of words, from those of their tokens."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aftexport.heads.head import Double
from aftexport.heads.token_spans import FIXED_POINT, UNIT

WordRule = Literal["first", "average", "max"]
"""The label of a word: of its first token, by the mean of its scores, or of its surest token."""


class WordBuilder:
    """The words of tokens that come in blocks.

    Args:
        rule: the rule for the label of a word.
        width: the number of labels.
    """

    def __init__(self, rule: WordRule, width: int) -> None:
        self._rule = rule
        self._open = np.empty(0, UNIT)
        # For the rule average: sums of the scores of all labels, and numbers of tokens.
        self._sums = np.empty((0, width), np.int64)
        self._counts = np.empty(0, np.int64)

    def add(
        self, tokens: NDArray[Any], scores: Double | None, starts: NDArray[np.bool_]
    ) -> NDArray[Any]:
        """Add tokens, and return the words that they complete.

        Args:
            tokens: the tokens, of type ``UNIT``.
            scores: the scores ``[n, width]`` of all labels, for the rule average; else None.
            starts: whether each token starts a word.
        """
        tokens = np.concatenate([self._open, tokens])
        firsts = np.flatnonzero(np.append(np.ones(len(self._open), bool), starts))
        if not len(firsts) or firsts[0]:  # the first token of a document starts a word
            firsts = np.append(0, firsts)
        lasts = np.append(firsts[1:], len(tokens)) - 1
        words = tokens[firsts]
        if self._rule == "max":
            words = tokens[_largest(tokens["score"], firsts)]
        words["start"], words["end"] = tokens["start"][firsts], tokens["end"][lasts]
        if scores is not None:
            self._average(words, scores, firsts)
        self._open = words[-1:]
        return words[:-1]

    def finish(self) -> NDArray[Any]:
        """Return the last word, if there is one."""
        return self._open

    def _average(self, words: NDArray[Any], scores: Double, firsts: NDArray[np.int64]) -> None:
        """Set the label and the score of words by the mean of the scores of their tokens."""
        sums = np.concatenate([self._sums, np.rint(scores * FIXED_POINT).astype(np.int64)])
        sums = np.add.reduceat(sums, firsts)
        counts = np.append(self._counts, np.ones(len(scores), np.int64))
        counts = np.add.reduceat(counts, firsts)
        words["label"] = np.where(words["label"] < 0, -1, sums.argmax(1))
        words["score"] = sums.max(1) / (counts * FIXED_POINT)
        self._sums, self._counts = sums[-1:], counts[-1:]


def _largest(values: Double, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of the first of the largest values in each segment."""
    segments = np.zeros(len(values), np.int64)
    segments[firsts[1:]] = 1
    segments = segments.cumsum()
    found = np.flatnonzero(values == np.maximum.reduceat(values, firsts)[segments])
    return found[np.flatnonzero(np.diff(segments[found], prepend=-1))]
