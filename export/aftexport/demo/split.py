"""An honest split: near-duplicates stay on one side.

Copied files and files made from one template would otherwise be learned by heart
in training and recognised in the test. Two documents are near-duplicates where
their shingles (runs of consecutive lines, or of words where there are few lines)
have a Jaccard similarity of ``SIMILAR`` or more; whatever is linked by a chain of
near-duplicates is one group, and a group is never divided.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import connected_components
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.model_selection import StratifiedGroupKFold

from aftexport.demo.corpus import Corpus
from aftexport.errors import UsageError

SIMILAR = 0.2
FOLDS = 5
"""One fold in ``FOLDS`` is held out."""

_LINES = 3
_WORDS = 8
_FEW_LINES = 10


@dataclass(frozen=True)
class Split:
    """Documents to train on and documents to judge by.

    Attributes:
        train, test: no near-duplicate of a document of one is in the other.
        groups: number of groups of near-duplicates, single documents included.
    """

    train: Corpus
    test: Corpus
    groups: int


def shingles(text: str) -> Iterator[str]:
    """Runs of 3 lines; of 8 words where the text has under 10 lines."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    units, width = (lines, _LINES) if len(lines) >= _FEW_LINES else (text.split(), _WORDS)
    for start in range(max(1, len(units) - width + 1)):
        yield "\n".join(units[start : start + width])


def near_duplicates(texts: Sequence[str]) -> NDArray[np.int32]:
    """Groups documents that are near-duplicates, directly or by a chain of others.

    Returns:
        int32 ``[len(texts)]``: equal numbers for documents of one group.
    """
    vectorizer = CountVectorizer(analyzer=shingles, binary=True, dtype=np.int32)
    present = vectorizer.fit_transform(texts).tocsr()
    sizes = np.asarray(present.sum(1)).ravel()
    shared = (present @ present.T).tocoo()
    union = sizes[shared.row] + sizes[shared.col] - shared.data
    shared.data = (shared.data >= SIMILAR * union).astype(np.int32)
    shared.eliminate_zeros()
    _, groups = connected_components(shared, directed=False)
    return np.asarray(groups, np.int32)


def split(corpus: Corpus, seed: int) -> Split:
    """Holds out one document in ``FOLDS``, with the labels in proportion and no group divided.

    Raises:
        UsageError: under two labels, or a label with too few distinct documents
            to be on both sides.
    """
    if len(corpus.classes) < 2:
        raise UsageError(
            f"The documents have {len(corpus.classes)} distinct labels.",
            "Give documents of at least two labels.",
        )
    groups = near_duplicates(corpus.texts)
    distinct = Counter(label for label, _ in {*zip(corpus.labels, groups.tolist(), strict=True)})
    for label, count in sorted(distinct.items()):
        if count < FOLDS:
            raise UsageError(
                f"Label {label!r} has {count} distinct documents (near-duplicates count once).",
                f"Give at least {FOLDS} for every label.",
            )
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    train, test = next(folds.split(corpus.texts, corpus.labels, groups))
    result = Split(corpus.take(train), corpus.take(test), int(groups.max()) + 1)
    if missing := sorted(set(corpus.classes) - set(result.train.labels)):
        raise UsageError(
            f"No document is left to train on for {', '.join(map(repr, missing))}.",
            "Give more documents of it.",
        )
    return result
