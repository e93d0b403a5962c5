"""From a bundle to a model that is loaded, warm, compared with PyTorch, and measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aftexport.bundle import Bundle
from aftexport.parity import Comparison
from aftexport.verification import verify
from aftserve.calibration import Costs, calibrate
from aftserve.classifier import Classifier
from aftserve.engine import load_engine
from aftserve.settings import Settings


@dataclass(frozen=True)
class LoadedModel:
    """A model that can be served.

    Attributes:
        classifier: with its engine.
        golden: the bundle's own cases, run through that engine.
        costs: of its runs.
        safe: without kernels of our own.
    """

    classifier: Classifier
    golden: Sequence[Comparison]
    costs: Costs
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


def load_model(bundle: Bundle, settings: Settings, *, safe: bool = False) -> LoadedModel:
    """Loads the model of a bundle; the first request waits for nothing of this.

    Args:
        bundle: a checked bundle.
        settings: of the server.
        safe: in standard operators alone.

    Raises:
        EngineError: where the runtime refuses the model.
    """
    classifier = Classifier(
        bundle,
        load_engine(bundle, settings, safe=safe),
        max_tokens=settings.max_tokens,
        max_characters=settings.max_characters,
    )
    if classifier.has_tokenizer:
        classifier.tokenize("")
    golden = verify(bundle, engine=classifier.engine, fused=not safe)
    costs = calibrate(
        lambda documents, tokens: classifier.classify([np.zeros(tokens, np.int64)] * documents),
        classifier.max_tokens,
        settings.budget_tokens,
    )
    return LoadedModel(classifier, golden, costs, safe)


def load_trusted_model(bundle: Bundle, settings: Settings) -> LoadedModel:
    """Loads the model; where its golden cases fail and ``on_breach`` says so, the safe one."""
    model = load_model(bundle, settings)
    if model.breach is not None and settings.on_breach == "fallback":
        return load_model(bundle, settings, safe=True)
    return model
