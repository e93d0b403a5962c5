"""From a bundle to a model that is loaded, warm, compared with PyTorch, and measured."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from aftexport.bundle import CHUNKED, Bundle
from aftexport.choice import Choice, choose
from aftexport.engines.chunked import ChunkedModel
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.errors import BundleError, UsageError
from aftexport.parity import Comparison
from aftexport.report import stage
from aftexport.verification import verify, verify_engine
from aftserve.model.classifier import Classifier
from aftserve.model.costs import Costs, calibrate, measure_chunks, measured_chunk
from aftserve.settings import Settings


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be served.

    Attributes:
        classifier: with its engine.
        golden: the bundle's own cases, run through that engine.
        costs: of its runs.
        reason: what the engine is and why, as a sentence for people.
        safe: in standard operators alone, without kernels of our own.
    """

    classifier: Classifier
    golden: Sequence[Comparison]
    costs: Costs
    reason: str
    safe: bool

    @property
    def breach(self) -> str | None:
        """Why its answers are not PyTorch's; None where they are."""
        failed = [result for result in self.golden if not result.passed]
        if not failed:
            return None
        first = failed[0]
        return (
            f"{len(failed)} of {len(self.golden)} golden cases are outside the bound, "
            f"{first.subject} {first.case!r} by {first.error:.1e}"
        )


def load_model(bundle: Bundle, settings: Settings, console: Console) -> LoadedModel:
    """Loads the model of a bundle; the first request waits for nothing of this.

    Where its golden cases fail and ``on_breach`` says so, it is the safe one.

    Args:
        bundle: a checked bundle.
        settings: of the server.
        console: where progress goes.

    Raises:
        AftexportError: where the engine cannot be had.
    """
    _check_folders(settings)
    # Apart from the stage below: building an engine shows its own progress.
    choice = choose(
        bundle,
        settings.engine,
        threads=settings.threads or 0,
        console=console,
    )
    with stage(console, "Comparing with PyTorch's outputs, calibrating"):
        model = _prepare(bundle, settings, choice, safe=False)
    if model.breach is not None and settings.on_breach == "fallback":
        return load_safe_model(bundle, settings)
    return model


def load_safe_model(bundle: Bundle, settings: Settings) -> LoadedModel:
    """Loads the model to run it by its portable bodies alone; see ``load_model``.

    Raises:
        BundleError: where the bundle is no longer the one that was opened.
    """
    check_unchanged(bundle)
    engine = OnnxRuntimeEngine(bundle.model_path, threads=settings.threads or 0, fused=False)
    choice = Choice(engine, "ONNX Runtime by portable bodies alone: parity was broken.")
    return _prepare(bundle, settings, choice, safe=True)


def check_unchanged(bundle: Bundle) -> None:
    """Checks that the files of a bundle are still those it was opened with.

    Raises:
        BundleError: where they are not.
    """
    if Bundle.open(bundle.path).digest != bundle.digest:
        raise BundleError(
            bundle.path, "it changed while it was read", "Move a whole bundle into its place."
        )


def _check_folders(settings: Settings) -> None:
    """Checks that temporary files can be written: of long documents, and of the engine."""
    remedies = {
        settings.spill: "Name a folder by --spill.",
        None: "Name a folder by the variable TMPDIR, or mount one at /tmp.",
    }
    for folder, remedy in remedies.items():
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            place = folder or "a folder for temporary files"
            raise UsageError(
                f"No file can be written to {place} ({error.strerror}).", remedy
            ) from error


def _prepare(bundle: Bundle, settings: Settings, choice: Choice, *, safe: bool) -> LoadedModel:
    limits = [n for n in (choice.max_tokens, settings.max_tokens) if n is not None]
    chunked = _chunked(bundle, settings, choice, safe)
    classifier = Classifier(
        bundle,
        choice.engine,
        min_tokens=choice.min_tokens,
        max_tokens=min(limits, default=None),
        max_characters=settings.max_characters,
        chunked=chunked,
        whole_tokens=chunked.whole_tokens if chunked else None,
        policy=settings.long_documents,
    )
    if classifier.has_tokenizer:
        classifier.tokenize("")
    costs = calibrate(
        lambda documents, tokens: classifier.classify([np.zeros(tokens, np.int64)] * documents),
        min_tokens=classifier.min_tokens,
        max_tokens=min(classifier.max_tokens, classifier.whole_tokens),
        budget_tokens=settings.budget_tokens,
        batching=bundle.manifest.batching,
    )
    if chunked is not None and classifier.in_chunks(classifier.max_tokens):
        timed = chunked.in_chunks_of(measured_chunk(costs, chunked.chunk_tokens))
        in_chunks = measure_chunks(
            lambda tokens: timed.run(np.zeros(tokens, np.int64)),
            timed.chunk_tokens,
            classifier.max_tokens,
        )
        costs = Costs(costs.measurements, in_chunks, classifier.whole_tokens)
    golden = _golden(bundle, choice, safe)
    choice.engine.release()
    return LoadedModel(classifier, golden, costs, choice.reason, safe)


def _chunked(bundle: Bundle, settings: Settings, choice: Choice, safe: bool) -> ChunkedModel | None:
    """The model for documents over the memory budget; an engine of TensorRT has none."""
    plan = bundle.manifest.chunked
    if plan is None or choice.engine.name != OnnxRuntimeEngine.name:
        return None
    return ChunkedModel(
        bundle.path / CHUNKED,
        plan,
        threads=settings.threads or 0,
        memory_budget=settings.memory_budget,
        folder=settings.spill,
        fused=not safe,
    )


def _golden(bundle: Bundle, choice: Choice, safe: bool) -> list[Comparison]:
    if choice.engine.name == OnnxRuntimeEngine.name:
        return verify(bundle, engine=choice.engine, fused=not safe)
    assert choice.max_tokens is not None  # a built engine has a bound
    return verify_engine(
        bundle, choice.engine, min_tokens=choice.min_tokens, max_tokens=choice.max_tokens
    )
