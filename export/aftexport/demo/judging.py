"""The held-out documents within the model's limit, and its accuracy on them beside baselines."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aftexport.demo.documents import Document
from aftexport.errors import UsageError
from aftexport.system.console import plain_table


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents."""

    documents: list[Document]
    left_out: int

    @property
    def longest(self) -> Document:
        """The document with the most tokens."""
        return max(self.documents, key=len)


def hold_out(documents: Sequence[Document], limit: int) -> HeldOut:
    """Return the documents of at most ``limit`` tokens."""
    fitting = [document for document in documents if len(document) <= limit]
    if not fitting:
        raise UsageError(
            f"Expected held-out documents of at most {limit:,} tokens, got only longer ones.",
            "Give shorter documents, or choose a mechanism for longer ones.",
        )
    return HeldOut(fitting, len(documents) - len(fitting))


def accuracies(
    train: Sequence[Document], held_out: HeldOut, answers: Sequence[str], name: str
) -> Table:
    """Return the accuracy of a model beside those of two baselines that see only bytes."""
    documents = held_out.documents
    labels, _ = zip(*Counter(d.label for d in train).most_common(1), strict=True)
    found = {
        "always the most common label": [*labels] * len(documents),
        "logistic regression on bytes": byte_regression(train, documents),
        f"[bold]{name}[/]": answers,
    }
    table = plain_table("classifier", f"accuracy, {len(documents)} held-out documents")
    table.columns[1].justify = "right"
    for classifier, own in found.items():
        right = sum(one == d.label for one, d in zip(own, documents, strict=True))
        table.add_row(classifier, f"{right / len(documents):.1%}")
    return table


def byte_regression(train: Sequence[Document], documents: Sequence[Document]) -> list[str]:
    """Return the answers of a logistic regression on byte frequencies, fitted to ``train``."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    model.fit(byte_frequencies(train), [document.label for document in train])
    return [str(label) for label in model.predict(byte_frequencies(documents))]


def byte_frequencies(documents: Sequence[Document]) -> NDArray[np.float64]:
    """Return the frequency of each byte in each text, float64 ``[len(documents), 256]``."""
    encoded = [np.frombuffer(document.text.encode(), np.uint8) for document in documents]
    return np.stack([np.bincount(text, minlength=256) / text.size for text in encoded])
