"""From a bundle to a model that is loaded, warmed up, compared with PyTorch, and estimated."""

import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from aftexport.bundle.bundle import CHUNKED, Bundle
from aftexport.bundle.manifest import WindowPolicy
from aftexport.chunked.runner import ChunkedModel
from aftexport.chunked.windows import WindowedModel, default_run_windows
from aftexport.deploy.choose_engine import ChosenEngine, choose_engine
from aftexport.engines import RunStoppedError, Stop
from aftexport.engines.onnxruntime import PROVIDERS, OnnxRuntimeEngine
from aftexport.engines.peak_memory import PeakMemory, predict_memory
from aftexport.engines.product_methods import forced_methods, product_methods
from aftexport.errors import BundleError, UsageError
from aftexport.extra_inputs import blank_values
from aftexport.parity import TOLERANCES, Comparison
from aftexport.parity.run_cases import verify, verify_engine
from aftexport.system.console import stage
from aftplugins.methods import METHOD_VARIABLE, MethodChoice
from aftserve.model.answers import Decoding
from aftserve.model.classifier import Classifier
from aftserve.model.costs import CostMeasurement, MeasuredRange, Shape, SlowdownFactor
from aftserve.settings import Settings

logger = logging.getLogger(__name__)

_EXACT_METHOD = "fp32"
Fits = Callable[[int, int], bool]
"""Whether a run of a number of documents of a length fits the memory budget."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A loaded model."""

    name: str
    classifier: Classifier
    golden: Sequence[Comparison]  # results of the bundle's golden cases on that engine
    measurement: CostMeasurement  # begins with first estimates
    reason: str  # the choice of the engine and its reason, as a sentence
    uses_standard_ops_only: bool  # without our kernels
    # Of its products in reduced precision, which the CPU kernels have.
    methods: Sequence[MethodChoice]
    inexact_methods: Sequence[str] = ()  # names of those that bring golden cases out of bound
    slowdown: SlowdownFactor = field(default_factory=SlowdownFactor)

    @property
    def breach(self) -> str | None:
        """The golden cases that are out of bound, as a sentence; None if all are within."""
        failed = [result for result in self.golden if not result.passed]
        if not failed:
            return None
        first = failed[0]
        names = ", ".join(self.inexact_methods)
        cause = f", because of the method {names} of this processor" if names else ""
        return (
            f"{len(failed)} of {len(self.golden)} golden cases are outside the bound, "
            f"{first.subject} {first.case!r} by {first.largest_error:.1e}{cause}"
        )

    @property
    def remedy(self) -> str:
        """The remedy for a breach, in the imperative."""
        exact = f"Set {METHOD_VARIABLE}={_EXACT_METHOD}, or export"
        return f"{exact if self.inexact_methods else 'Export'} the model again."


@dataclass(eq=False)
class ActiveBundle:
    """A bundle and its loaded model.

    A request stays with the bundle that it began with. Documents of two bundles never share a run.
    """

    bundle: Bundle  # checked
    model: LoadedModel  # another one after the server falls back
    since: datetime = field(default_factory=lambda: datetime.now(UTC))


def model_name(path: Path, settings: Settings) -> str:
    """Return the name under which the model of the bundle at a path answers."""
    return settings.model_name or path.absolute().name.removesuffix(".bundle")


def load_model(bundle: Bundle, settings: Settings, console: Console) -> LoadedModel:
    """Load the model of a bundle and warm it up.

    If its golden cases fail and ``on_breach`` is ``fallback``, load it in standard operators only.

    Raises:
        AftexportError: if the engine is not available.
    """
    _check_folders(settings)
    bound = TOLERANCES[bundle.manifest.precision].bound
    if (bundle.manifest.tolerance or bound) > bound:
        logger.warning(
            "%s: the tolerance of the bundle is %g, and the bound of %s is %g: its answers may "
            "differ from PyTorch's by as much",
            bundle.path,
            bundle.manifest.tolerance,
            bundle.manifest.precision,
            bound,
        )
    # Choose the engine outside the stage below, because building one shows its own progress.
    choice = choose_engine(
        bundle,
        settings.engine,
        threads=settings.threads or 0,
        provider=settings.provider,
        console=console,
    )
    reference = bundle.manifest.reference_name
    with stage(console, f"Comparing {bundle.path.name} with the outputs of {reference}"):
        model = _Load(bundle, settings, choice).run()
    if model.breach is not None and settings.on_breach == "fallback":
        return load_standard_ops_model(bundle, settings)
    return model


def load_standard_ops_model(bundle: Bundle, settings: Settings) -> LoadedModel:
    """Load the model to run it in standard operators only; see ``load_model``."""
    check_unchanged(bundle)
    engine = OnnxRuntimeEngine(
        bundle.model_path,
        threads=settings.threads or 0,
        fused=False,
        provider=settings.provider,
    )
    choice = ChosenEngine(engine, "ONNX Runtime with fallbacks only, because parity was broken.")
    return _Load(bundle, settings, choice, standard_ops_only=True).run()


def check_unchanged(bundle: Bundle) -> None:
    """Check that the files of a bundle did not change since it was opened.

    Raises:
        BundleError: if they changed.
    """
    if Bundle.open(bundle.path).digest != bundle.digest:
        raise BundleError(
            bundle.path, "it changed while it was read", "Move a whole bundle into its place."
        )


def _check_folders(settings: Settings) -> None:
    """Check that files can be written for long documents and for the engine."""
    remedies = {
        settings.spill: "Name a folder by --spill.",
        None: "Name a folder by the variable TMPDIR, or mount one at /tmp.",
    }
    for folder, remedy in remedies.items():
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            place = folder or "The folder for temporary files"
            raise UsageError(f"{place} cannot be written to ({error.strerror}).", remedy) from error


@dataclass(frozen=True)
class _Load:
    """One load of a bundle's model with an engine."""

    bundle: Bundle
    settings: Settings
    choice: ChosenEngine
    standard_ops_only: bool = False

    def run(self) -> LoadedModel:
        """Load the model, warm it up, compare its golden cases, and make the first estimates."""
        bundle, settings, choice = self.bundle, self.settings, self.choice
        limits = [n for n in (choice.max_tokens, settings.max_tokens) if n is not None]
        chunked: ChunkedModel | WindowedModel | None
        if settings.long_documents == "exact" and bundle.manifest.windows is not None:
            memory = self._memory(bundle.manifest.windows.tokens)
            chunked = self._windowed(bundle.manifest.windows, memory)
        else:
            chunked = self._chunked()
            longest = bundle.manifest.max_tokens
            if chunked is not None:  # a table of positions has no rows beyond the limit
                longest = min(chunked.whole_tokens, longest or chunked.whole_tokens)
            memory = self._memory(longest)
        classifier = Classifier(
            bundle,
            choice.engine,
            min_tokens=choice.min_tokens,
            max_tokens=min(limits, default=None),
            max_characters=settings.max_characters,
            chunked=chunked,
            memory=memory,
            memory_budget=settings.memory_budget,
            policy=settings.long_documents,
            spill=settings.spill,
        )
        classifier.measure_tokenizer()
        fits = partial(memory.fits, settings.memory_budget) if memory else None
        measurement = _measurement(bundle, settings, classifier, fits)
        measurement.measure_first()
        golden = self._golden(None if chunked else fits)
        classifier.release()
        methods = self._methods()
        inexact = () if all(r.passed for r in golden) else self._inexact(methods)
        return LoadedModel(
            model_name(bundle.path, settings),
            classifier,
            golden,
            measurement,
            choice.reason,
            self.standard_ops_only,
            methods,
            inexact,
        )

    @property
    def _is_onnxruntime(self) -> bool:
        return self.choice.engine.name == OnnxRuntimeEngine.name

    def _inexact(self, methods: Sequence[MethodChoice]) -> Sequence[str]:
        """Return the methods of a breach if the golden cases are within the bound without them."""
        names = sorted({choice.methods[0] for choice in methods} - {_EXACT_METHOD})
        if not names:
            return ()
        with forced_methods([_EXACT_METHOD]):
            engine = OnnxRuntimeEngine(self.bundle.model_path, threads=self.settings.threads or 0)
            exact = verify(self.bundle, engine=engine, provider=self.settings.provider)
        return names if all(result.passed for result in exact) else ()

    def _methods(self) -> Sequence[MethodChoice]:
        if self.standard_ops_only or not self._is_onnxruntime or self.settings.provider != "cpu":
            return ()
        return product_methods(self.bundle.model_path, self.bundle.manifest.precision)

    def _memory(self, longest: int | None) -> PeakMemory | None:
        """Return the predicted memory of runs; None on TensorRT, whose engines have a bound."""
        if not self._is_onnxruntime:
            return None
        manifest = self.bundle.manifest
        least = manifest.chunked.token_bytes if manifest.chunked else 0
        has_kernels = PROVIDERS[self.settings.provider].kernels is not None
        fused = has_kernels and not self.standard_ops_only
        return predict_memory(self.bundle.model_path, longest, fused=fused, token_bytes=least)

    def _windowed(self, policy: WindowPolicy, memory: PeakMemory | None) -> WindowedModel:
        """Return the model for documents over a window; several windows share a run."""
        budget = self.settings.memory_budget
        count = default_run_windows(self.bundle.manifest)
        while memory and count and not memory.fits(budget, count, policy.tokens):
            count -= 1
        if not count:
            raise UsageError(
                f"Expected a memory budget that fits a window of {policy.tokens} tokens, got "
                f"{self.settings.memory_budget_mib:g} MiB.",
                "Raise --memory-budget-mib.",
            )
        return WindowedModel(self.bundle.manifest, self.choice.engine, run_windows=count)

    def _chunked(self) -> ChunkedModel | None:
        """Return the model for documents over the memory budget; None on TensorRT."""
        plan, settings = self.bundle.manifest.chunked, self.settings
        if plan is None or not self._is_onnxruntime:
            return None
        return ChunkedModel(
            self.bundle.path / CHUNKED,
            plan,
            threads=settings.threads or 0,
            memory_budget=settings.memory_budget,
            folder=settings.spill,
            fused=not self.standard_ops_only,
            provider=settings.provider,
        )

    def _golden(self, fits: Fits | None) -> list[Comparison]:
        """Compare the golden cases, except those whose runs exceed the memory budget."""
        choice, settings = self.choice, self.settings
        if not self._is_onnxruntime:
            assert choice.max_tokens is not None  # a built engine has a bound
            return verify_engine(
                self.bundle,
                choice.engine,
                min_tokens=choice.min_tokens,
                max_tokens=choice.max_tokens,
            )
        every = self.bundle.golden()
        cases = [one for one in every if one.subject != "model" or not fits or fits(*one.shape)]
        if not any(one.subject == "model" for one in cases):
            raise UsageError(
                f"Expected a memory budget that fits a golden case, got "
                f"{settings.memory_budget_mib:g} MiB.",
                "Raise --memory-budget-mib.",
            )
        if skipped := len(every) - len(cases):
            logger.info("%d golden cases exceed --memory-budget-mib and were left out", skipped)
        return verify(
            self.bundle,
            cases=cases,
            engine=choice.engine,
            fused=not self.standard_ops_only,
            provider=settings.provider,
        )


def _measurement(
    bundle: Bundle, settings: Settings, classifier: Classifier, fits: Fits | None
) -> CostMeasurement:
    chunked = classifier.chunked if classifier.in_chunks(classifier.max_tokens) else None
    plan = bundle.manifest.chunked

    def run(shape: Shape, stop: Stop | None) -> None:
        blank = classifier.blank(shape.tokens)
        extras = blank_values(bundle.manifest.extra_inputs, shape.tokens)
        if shape.chunk_tokens is None:
            words = Decoding(starts_word=np.ones(shape.tokens, np.bool_))
            count = shape.documents
            classifier.classify([blank] * count, stop, [words] * count, [extras] * count)
            return
        assert chunked is not None  # otherwise no such shape is measured
        with closing(chunked.in_chunks_of(shape.chunk_tokens).parts(blank, extras)) as parts:
            for _ in parts:
                if stop is not None and stop.is_requested:
                    raise RunStoppedError

    limits = MeasuredRange(
        min_tokens=classifier.min_tokens,
        max_tokens=min(classifier.max_tokens, classifier.whole_tokens),
        budget_tokens=settings.budget_tokens,
        batching=bundle.manifest.batching,
        chunk_tokens=chunked.chunk_tokens if chunked else None,
        min_chunk_tokens=chunked.in_chunks_of(1).chunk_tokens if chunked else 1,
        max_chunked_tokens=classifier.max_tokens,
        quadratic_tokens=plan.quadratic_tokens if plan and not classifier.windowed else None,
        **({"fits": fits} if fits else {}),
    )
    return CostMeasurement(run, limits)
