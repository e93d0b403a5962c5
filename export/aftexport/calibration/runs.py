"""Runs of labelled documents in a bundle's own engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.calibration.data import LabelledDocument, heads_to_calibrate, truths_by_head
from aftexport.calibration.fit import Sample
from aftexport.chunked.runner import MEMORY_BUDGET, ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import EngineError
from aftexport.heads.head import Double
from aftexport.verify.documents import as_inputs


def run_documents(
    bundle: Bundle,
    documents: Sequence[LabelledDocument],
    *,
    progress: Callable[[int, int, str], None],
    memory_budget: int = MEMORY_BUDGET,
) -> dict[str, Sample]:
    """Return the sample of each head that has labelled documents.

    Documents over the memory budget run in chunks, if the bundle has a plan for it.

    Args:
        bundle: the bundle.
        documents: the documents.
        progress: a function that shows the number of documents that are done.
        memory_budget: the maximum bytes of a document in memory.

    Raises:
        EngineError: if the engine fails, or an output is not finite.
        StorageError: if there is not enough space for a long document.
    """
    model = _Model(bundle, memory_budget)
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

    def __init__(self, bundle: Bundle, memory_budget: int) -> None:
        self._manifest = bundle.manifest
        self._engine = OnnxRuntimeEngine(bundle.model_path)
        self._chunked: ChunkedModel | None = None
        if bundle.manifest.chunked is not None:
            self._chunked = ChunkedModel(
                bundle.path / CHUNKED, bundle.manifest.chunked, memory_budget=memory_budget
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
