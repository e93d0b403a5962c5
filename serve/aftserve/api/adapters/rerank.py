"""The relevance of documents for a query, by a model of pairs; two adapters have it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aftexport.bundle.manifest import Manifest
from aftexport.heads import BinaryClassification, Head, MultiLabelClassification, Regression
from aftexport.heads.head import sigmoid
from aftserve.api.adapters.adapter import heads_for_documents, put_names
from aftserve.api.request_body import Schema
from aftserve.model.classifier import Classifier
from aftserve.model.documents import DocumentAnswer

_RANKERS: tuple[type[Head], ...] = (BinaryClassification, MultiLabelClassification, Regression)
"""The heads that may have one logit for the relevance of a document."""


@dataclass(frozen=True)
class Ranked:
    """The relevance of one document."""

    index: int  # in the request
    logit: float
    score: float


def rank(answers: Sequence[DocumentAnswer], name: str) -> list[Ranked]:
    """Return the documents by the only logit of a head, the most relevant first.

    Of equal ones the last is first, as in text-embeddings-inference.
    """
    logits = np.array([answer.logits[name][0] for answer in answers], np.float64)
    rows = zip(logits.tolist(), sigmoid(logits).tolist(), strict=True)
    ranked = [Ranked(index, *row) for index, row in enumerate(rows)]
    return sorted(ranked, key=lambda one: one.logit)[::-1]


def rankers(manifest: Manifest) -> list[str]:
    """Return the heads with one logit of a model of pairs."""
    names = heads_for_documents(manifest, *_RANKERS) if manifest.text_pairs else []
    return [name for name in names if manifest.heads[name].width == 1]


def put_rankers(document: Schema, path: str, classifier: Classifier | None) -> None:
    """Put the heads of ``rankers`` into an OpenAPI document."""
    names = [] if classifier is None else rankers(classifier.manifest)
    put_names(document, path, names)
