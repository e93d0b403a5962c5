"""The description of the server for ``GET /info``."""

from collections import Counter
from dataclasses import asdict

from aftexport import __version__
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftserve.model.active import ActiveBundle
from aftserve.model.inline_limit import max_inline_tokens
from aftserve.model.wanted import explainable
from aftserve.schemas import Calibration, Info, Limits, ProductMethod
from aftserve.serving.service import Service


def describe(service: Service) -> Info:
    """Return the description of the server, its model and its limits."""
    active, settings = service.active, service.settings
    model, manifest = active.model, active.bundle.manifest
    classifier, first = model.classifier, next(iter(manifest.heads.values()))
    is_onnxruntime = classifier.engine.name == OnnxRuntimeEngine.name
    precisions = Counter(node.precision for node in manifest.node_precisions)
    return Info(
        version=__version__,
        bundle=active.bundle.digest,
        loaded=active.since,
        last_reload=service.reloader.last,
        engine=classifier.engine.name,
        provider=settings.provider if is_onnxruntime else None,
        uses_standard_ops_only=model.uses_standard_ops_only,
        heads=manifest.heads,
        labels=list(first.names),
        scores=first.meaning,
        head_calibrations=manifest.calibration,
        vocab_size=manifest.vocab_size,
        features=manifest.features,
        extra_inputs=manifest.extra_inputs,
        precision=manifest.precision,
        node_precisions=dict(sorted(precisions.items())) or None,
        operators=manifest.operators,
        methods=[ProductMethod(**asdict(choice)) for choice in model.methods],
        tokenizer=classifier.has_tokenizer,
        evidence=manifest.evidence_heads is not None,
        explainable=explainable(manifest),
        limits=Limits(
            max_tokens=classifier.max_tokens,
            max_characters=settings.max_characters,
            max_documents=settings.max_documents,
            max_body_bytes=settings.max_body_bytes,
            max_array_bytes=settings.max_array_bytes,
            max_queue_seconds=settings.max_queue_seconds,
            deadline_seconds=settings.deadline_seconds,
            max_inline_tokens=max_inline_tokens(manifest.heads),
            budget_tokens=settings.budget_tokens,
            batching=manifest.batching,
            whole_tokens=min(classifier.whole_tokens, classifier.max_tokens),
            long_documents=settings.long_documents,
            whole_only=_whole_only(active),
        ),
        calibration=Calibration(
            slowdown=model.slowdown.value,
            measuring=not model.measurement.is_done,
            **model.costs.to_dict(),
        ),
    )


def _whole_only(active: ActiveBundle) -> str | None:
    classifier = active.model.classifier
    if classifier.chunked is not None:
        return None
    return (
        active.bundle.manifest.whole_only or f"{classifier.engine.name} runs no documents in chunks"
    )
