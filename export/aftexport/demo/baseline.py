"""Baselines of the demo, which see only the bytes of a document, without their order."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from aftexport.demo.corpus import Corpus


def majority(train: Corpus, texts: Sequence[str]) -> list[str]:
    """Return the most common label of ``train`` for every text."""
    label, _ = Counter(train.labels).most_common(1)[0]
    return [label] * len(texts)


def byte_regression(train: Corpus, texts: Sequence[str]) -> list[str]:
    """Return the answers of a logistic regression on byte frequencies, fitted to ``train``."""
    classifier = _logistic().fit(byte_frequencies(train.texts), train.labels)
    return [str(label) for label in classifier.predict(byte_frequencies(texts))]


def byte_labels(
    train: Sequence[str], holds: NDArray[np.bool_], texts: Sequence[str]
) -> NDArray[np.bool_]:
    """Return the labels of ``texts`` by a logistic regression on byte frequencies for each label.

    Args:
        train: texts.
        holds: bool ``[len(train), labels]``, whether each label holds.
        texts: texts to answer for.
    """
    fitted, asked = byte_frequencies(train), byte_frequencies(texts)
    answers = [
        _logistic().fit(fitted, column).predict(asked)
        if column.any() and not column.all()
        else np.full(len(texts), column[0])
        for column in holds.T
    ]
    return np.stack(answers, 1)


def byte_values(
    train: Sequence[str], values: NDArray[np.float64], texts: Sequence[str]
) -> NDArray[np.float64]:
    """Return the values of ``texts`` by a ridge regression on byte frequencies.

    They stay within the range of ``values``: a byte that is rare in training may be frequent here.
    """
    model = make_pipeline(StandardScaler(), Ridge(alpha=10.0))
    model.fit(byte_frequencies(train), values)
    answers = np.asarray(model.predict(byte_frequencies(texts)), np.float64)
    return answers.clip(values.min(), values.max())


def byte_frequencies(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return the frequency of each byte in each text, float64 ``[len(texts), 256]``."""
    encoded = [np.frombuffer(text.encode(), np.uint8) for text in texts]
    return np.stack([np.bincount(document, minlength=256) / document.size for document in encoded])


def _logistic() -> Pipeline:
    return make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
