"""The split of documents into training and test; apart, as it knows no models.

Near-duplicates are on one side. Otherwise the model would memorize copied files and files of one
template in training, and recognize them in the test. Two documents are near-duplicates if their
shingles (runs of consecutive lines, or of words in a text of few lines) have a Jaccard similarity
of at least ``SIMILAR``. Documents that are linked by a chain of near-duplicates form one group,
and a group is never divided.
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
    """Training documents and test documents."""

    train: Corpus  # documents; near-duplicates are always in the same part
    test: Corpus
    groups: int  # groups of near-duplicates, including single documents


def shingles(text: str) -> Iterator[str]:
    """Yield the runs of 3 lines, or the runs of 8 words if the text has under 10 lines."""
    lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
    units, width = (lines, _LINES) if len(lines) >= _FEW_LINES else (text.split(), _WORDS)
    for start in range(max(1, len(units) - width + 1)):
        yield "\n".join(units[start : start + width])


def near_duplicates(texts: Sequence[str], similar: float = SIMILAR) -> NDArray[np.int32]:
    """Return int32 ``[len(texts)]``, equal for near-duplicates, also by a chain of others."""
    vectorizer = CountVectorizer(analyzer=shingles, binary=True, dtype=np.int32)
    present = vectorizer.fit_transform(texts).tocsr()
    sizes = np.asarray(present.sum(1)).ravel()
    shared = (present @ present.T).tocoo()
    union = sizes[shared.row] + sizes[shared.col] - shared.data
    shared.data = (shared.data >= similar * union).astype(np.int32)
    shared.eliminate_zeros()
    _, groups = connected_components(shared, directed=False)
    return np.asarray(groups, np.int32)


def split(corpus: Corpus, seed: int) -> Split:
    """Hold out one document in ``FOLDS``, with proportional labels and undivided groups."""
    if len(corpus.classes) < 2:
        raise UsageError(
            f"Expected at least 2 distinct labels, got {len(corpus.classes)}.",
            "Give documents of at least two labels.",
        )
    groups = near_duplicates(corpus.texts)
    distinct = Counter(label for label, _ in {*zip(corpus.labels, groups.tolist(), strict=True)})
    for label, count in sorted(distinct.items()):
        if count < FOLDS:
            raise UsageError(
                f"Expected at least {FOLDS} distinct documents for the label {label!r}, got "
                f"{count} (near-duplicates count once).",
                f"Give at least {FOLDS} documents for every label.",
            )
    folds = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    train, test = next(folds.split(corpus.texts, corpus.labels, groups))
    result = Split(corpus.take(train), corpus.take(test), int(groups.max()) + 1)
    if missing := sorted(set(corpus.classes) - set(result.train.labels)):
        raise UsageError(
            f"Expected training documents for every label, got none for "
            f"{', '.join(map(repr, missing))}.",
            "Give more documents of this label.",
        )
    return result
