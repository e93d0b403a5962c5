"""Labelled documents for a calibration, and their runs in the bundle's own engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.calibration.fit import Sample
from aftexport.chunked.runner import MEMORY_BUDGET, ChunkedModel
from aftexport.chunked.windows import WindowedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError, UsageError
from aftexport.extra_inputs import NO_EXTRAS, ExtraValues
from aftexport.heads import Head, MultiLabelClassification
from aftexport.heads.head import DecidingHead, Double
from aftexport.verify.documents import (
    as_inputs,
    document_of,
    extras_of,
    lines_of,
    object_of,
    with_pair,
)

_FORMS = (
    'Give {"text": "...", "label": "NAME"} on each line; "labels": ["NAME", ...] for independent '
    'labels; or "labels": {"HEAD": ...} for several heads.'
)
_MAX_SHOWN_LABELS = 10


@dataclass(frozen=True)
class LabelledDocument:
    """A document with its true labels."""

    line: int  # the number of its line
    tokens: NDArray[Any]  # the token ids, or the normalized features of each token
    # by the name of the head: the index of the label, or for each of independent labels whether it
    # holds
    truths: Mapping[str, NDArray[np.int64]]
    extras: ExtraValues = NO_EXTRAS


def heads_to_calibrate(manifest: Manifest) -> dict[str, DecidingHead]:
    """Return the heads with probabilities of labels for a document.

    Raises:
        UsageError: if there are none.
    """
    found: dict[str, DecidingHead] = {
        name: head for name, head in manifest.heads.items() if isinstance(head, DecidingHead)
    }
    if not found:
        tasks = ", ".join(f"{name} ({head.task})" for name, head in manifest.heads.items())
        raise UsageError(
            f"Expected a head that classifies documents, got {tasks}.",
            "Calibrate a bundle of a classifier.",
        )
    return found


def read_labelled_documents(
    path: Path, manifest: Manifest, tokenizer: Tokenizer | None
) -> list[LabelledDocument]:
    """Read labelled documents of a file.

    Raises:
        UsageError: if a line is invalid; the message has the number of the line.
    """
    heads = heads_to_calibrate(manifest)
    documents = []
    for number, line in lines_of(path):
        try:
            content = with_pair(object_of(line), manifest, tokenizer)
            truths = truths_of(content, heads)
            document = document_of(
                content, manifest, tokenizer, in_windows=manifest.windows is not None
            )
            extras = extras_of(content, manifest, len(document))
            tokens: NDArray[Any] = np.asarray(document)
            if manifest.features is None:
                tokens = tokens.astype(np.int32)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: {error}.", _FORMS) from error
        documents.append(LabelledDocument(number, tokens, truths, extras))
    if not documents:
        raise UsageError(f"{path} has no documents.", _FORMS)
    return documents


def notes_on(documents: Sequence[LabelledDocument], manifest: Manifest) -> list[str]:
    """Return a sentence on repeated documents, and on each head without labels."""
    notes = []
    if count := len(documents) - len(set(map(_content, documents))):
        notes.append(
            f"Expected different documents, got {count:,} that repeat an earlier one. Intervals "
            "and bounds are too narrow with repeats."
        )
    labelled = {name for document in documents for name in document.truths}
    notes += [
        f"The head {name!r} gets no calibration, because no document has its labels."
        for name in heads_to_calibrate(manifest)
        if name not in labelled
    ]
    return notes


def _content(document: LabelledDocument) -> tuple[bytes, ...]:
    extras = document.extras.batch()
    return (document.tokens.tobytes(), *(extras[name].tobytes() for name in sorted(extras)))


def truths_by_head(documents: Sequence[LabelledDocument]) -> dict[str, NDArray[np.int64]]:
    """Return the truths of each labelled head, in the order of its documents."""
    found: dict[str, list[NDArray[np.int64]]] = {}
    for document in documents:
        for name, truth in document.truths.items():
            found.setdefault(name, []).append(truth)
    return {name: np.stack(truths) for name, truths in found.items()}


def truths_of(
    content: Mapping[str, Any], heads: Mapping[str, Head]
) -> dict[str, NDArray[np.int64]]:
    """Return the truth of each head that a line labels.

    Raises:
        ValueError: if the line has no labels, or a label does not fit its head.
    """
    label, labels = content.get("label"), content.get("labels")
    if (label is None) == (labels is None):
        raise ValueError("expected exactly one of label and labels")
    if isinstance(labels, dict):
        if unknown := [name for name in labels if name not in heads]:
            raise ValueError(f"expected labels of {_listed(heads)}, got {unknown[0]!r}")
        if not labels:
            raise ValueError("expected the labels of at least one head, got none")
        return {name: _truth(heads[name], given) for name, given in labels.items()}
    if len(heads) > 1:
        raise ValueError(f"expected labels by head, for {_listed(heads)}")
    ((name, head),) = heads.items()
    field = "labels" if isinstance(head, MultiLabelClassification) else "label"
    if content.get(field) is None:
        raise ValueError(f"expected {field} for {head.task}")
    return {name: _truth(head, content[field])}


def _truth(head: Head, given: Any) -> NDArray[np.int64]:
    if not isinstance(head, MultiLabelClassification):
        return np.array(_index(head, given))
    if not isinstance(given, list):
        raise ValueError(f"expected a list of labels, got {type(given).__name__}")
    truth = np.zeros(head.width, np.int64)
    truth[[_index(head, one) for one in given]] = 1
    return truth


def _index(head: Head, label: Any) -> int:
    if label not in head.names:
        raise ValueError(f"expected one of {_listed(head.names)}, got {str(label)[:80]!r}")
    return head.names.index(label)


def _listed(names: Mapping[str, Any] | tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, list(names)[:_MAX_SHOWN_LABELS]))
    return shown if len(names) <= _MAX_SHOWN_LABELS else f"{shown} and others"


def run_documents(
    bundle: Bundle,
    documents: Sequence[LabelledDocument],
    *,
    progress: Callable[[int, int, str], None],
) -> dict[str, Sample]:
    """Return the sample of each head that has labelled documents.

    Documents over the memory budget run in chunks, if the bundle has a plan for it; those over a
    window in windows, if it declares these.

    Raises:
        EngineError: if the engine fails, or an output is not finite.
        StorageError: if there is not enough space for a long document.
    """
    model = _Model(bundle)
    truths = truths_by_head(documents)
    logits: dict[str, list[Double]] = {name: [] for name in truths}
    tokens: dict[str, list[int]] = {name: [] for name in truths}
    for done, document in enumerate(documents):
        progress(done, len(documents), "documents")
        for name, row in model.run(document).items():
            logits[name].append(row)
            tokens[name].append(len(document.tokens))
    heads = heads_to_calibrate(bundle.manifest)
    return {
        name: Sample(heads[name], np.stack(logits[name]), np.array(tokens[name]), truths[name])
        for name in heads
        if name in truths
    }


class _Model:
    """The model of a bundle, for one document at a time."""

    def __init__(self, bundle: Bundle) -> None:
        self._manifest = bundle.manifest
        self._engine = OnnxRuntimeEngine(bundle.model_path)
        self._chunked: ChunkedModel | WindowedModel | None = None
        if bundle.manifest.windows is not None:
            self._chunked = WindowedModel(bundle.manifest, self._engine)
        elif bundle.manifest.chunked is not None:
            self._chunked = ChunkedModel(
                bundle.path / CHUNKED, bundle.manifest.chunked, memory_budget=MEMORY_BUDGET
            )

    def run(self, document: LabelledDocument) -> dict[str, Double]:
        """Return the logits ``[width]`` of each labelled head."""
        tokens: NDArray[Any] = document.tokens
        if self._manifest.features is None:
            tokens = tokens.astype(np.int64)
        if self._chunked is not None and len(tokens) > self._chunked.whole_tokens:
            outputs = self._chunked.run(tokens, document.extras)
        else:
            outputs = self._engine.run(as_inputs([tokens], self._manifest, [document.extras]))
        logits = {name: outputs[name][0].astype(np.float64) for name in document.truths}
        if not all(np.isfinite(one).all() for one in logits.values()):
            raise EngineError(
                f"The logits of the document on line {document.line} must be finite, got NaN or "
                "infinity.",
                "Remove the document.",
            )
        return logits
