"""Baselines for the classifier: the most common label, and a regression on byte counts."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aftexport.demo.corpus import Corpus


def majority(train: Corpus, texts: Sequence[str]) -> list[str]:
    """Return the most common label of ``train`` for every text."""
    label, _ = Counter(train.labels).most_common(1)[0]
    return [label] * len(texts)


def byte_regression(train: Corpus, texts: Sequence[str]) -> list[str]:
    """Return the answers of a logistic regression on byte frequencies, fitted to ``train``."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    classifier.fit(byte_frequencies(train.texts), train.labels)
    return [str(label) for label in classifier.predict(byte_frequencies(texts))]


def byte_frequencies(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the frequency of each byte in each text, float64 ``[len(texts), 256]``."""
    encoded = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return np.stack([np.bincount(document, minlength=256) / document.size for document in encoded])
