"""Endpoints for operators: health, metrics, a description of the server, reload and parity."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response, params

from aftexport import __version__
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftserve.api.document_answers import DeadlineSeconds, deadline_of, run_until_disconnect
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.model_choice import OPEN, ChosenModel, readiness
from aftserve.api.request_body import accepted_type, body_schema, read_json
from aftserve.model.answers import max_inline_tokens
from aftserve.model.load import ActiveBundle
from aftserve.model.wanted import explainable
from aftserve.observability.metrics import OPENMETRICS
from aftserve.parity.monitor import ParityCheck, ParityReport
from aftserve.schemas import (
    Calibration,
    DocumentRequest,
    Info,
    Limits,
    Problem,
    ProductMethod,
    Reload,
    Status,
)
from aftserve.serving.repository import ModelRepository
from aftserve.serving.service import Service

PROBES = ("/healthz", "/readyz", "/metrics")
"""The paths that load balancers and monitors ask every few seconds."""
_METRICS_RESPONSE = {
    "content": {
        kind: {"schema": {"type": "string"}}
        for kind in ("text/plain", "application/openmetrics-text")
    }
}


def create_router(models: ModelRepository, guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints of the server's state; ``guards`` leave out those of health."""
    problems = responses(Problem)
    guarded: dict[str, Any] = {"dependencies": guards}
    refusals: dict[int | str, dict[str, Any]] = {status: problems[status] for status in GUARDED}
    router = APIRouter()

    unknown: dict[int | str, dict[str, Any]] = {404: problems[404]}

    @router.get("/healthz", dependencies=OPEN, responses=unknown)
    async def healthz() -> Status:
        """The process is alive."""
        return Status(status="alive")

    @router.get("/readyz", dependencies=OPEN, responses={**unknown, 503: {"model": Status}})
    async def readyz(request: Request, response: Response) -> Status:
        """The server takes requests: a model answers, and the server is not about to stop."""
        is_ready, status = readiness(request)
        response.status_code = 200 if is_ready else 503
        return Status(status=status)

    @router.get("/info", responses={**refusals, 404: problems[404]}, **guarded)
    async def info(service: ChosenModel) -> Info:
        """The model, the limits, and the cost of a document on this machine."""
        return _describe(service)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={**refusals, 200: _METRICS_RESPONSE},
        **guarded,
    )
    async def metrics(request: Request) -> Response:
        """All metrics, in the text format of Prometheus, or in OpenMetrics if that is accepted."""
        accepted = accepted_type(request, [OPENMETRICS.partition(";")[0]])
        content, kind = models.shared.metrics.exposition(openmetrics=accepted is not None)
        return Response(content, media_type=kind)

    return router


def create_reload_router(guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoint that reloads the bundle; ``guards`` require an admin key."""
    problems = responses(Problem)
    refusals: dict[int | str, dict[str, Any]] = {
        status: problems[status] for status in (401, 404, 429, 503)
    }
    refusals[403] = {"model": Problem, "description": "The API key is not marked admin."}
    refusals[409] = {"model": Problem, "description": "The bundle cannot be used."}
    router = APIRouter()

    @router.post("/reload", dependencies=guards, responses=refusals)
    async def reload(service: ChosenModel) -> Reload:
        """Load the bundle from its path again, and refuse it if it cannot be used.

        The previous bundle answers requests that were accepted earlier. The API key must be marked
        admin.
        """
        return await service.reloader.run()

    return router


def create_parity_router(guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints of parity."""
    problems = responses(Problem)
    unknown = {"model": Problem, "description": "The server has no PyTorch model."}
    router = APIRouter(
        dependencies=guards, responses={status: problems[status] for status in GUARDED}
    )

    @router.get("/parity", responses={404: problems[404]})
    async def report(service: ChosenModel) -> ParityReport:
        """The bundle's golden cases with PyTorch's outputs, as run when the server started."""
        return service.parity.report()

    @router.post(
        "/parity", responses={**problems, 404: unknown}, openapi_extra=body_schema(DocumentRequest)
    )
    async def compare(
        request: Request, service: ChosenModel, deadline_seconds: DeadlineSeconds = None
    ) -> ParityCheck:
        """Classify a document, and compare every output with PyTorch's."""
        service.check_open()
        max_tokens = service.model.classifier.max_tokens
        body = await read_json(request, DocumentRequest, max_entries={"input_ids": max_tokens})
        deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)
        work = service.compare(body.document, deadline, body.inputs or {})
        return await run_until_disconnect(work, request.receive, deadline)

    return router


def _describe(service: Service) -> Info:
    """Return the description of the server, its model and its limits."""
    active, settings = service.active, service.settings
    model, manifest = active.model, active.bundle.manifest
    classifier, first = model.classifier, next(iter(manifest.heads.values()))
    is_onnxruntime = classifier.engine.name == OnnxRuntimeEngine.name
    precisions = Counter(node.precision for node in manifest.node_precisions)
    return Info(
        version=__version__,
        name=service.name,
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
        text_pairs=manifest.text_pairs,
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
            long_documents=classifier.policy,
            windows=manifest.windows if classifier.windowed else None,
            whole_only=_whole_only(active),
        ),
        calibration=Calibration(
            slowdown=model.slowdown.value,
            measuring=not model.measurement.is_done,
            **model.measurement.costs.to_dict(),
        ),
    )


def _whole_only(active: ActiveBundle) -> str | None:
    classifier = active.model.classifier
    if classifier.chunked is not None:
        return None
    return (
        active.bundle.manifest.whole_only or f"{classifier.engine.name} runs no documents in chunks"
    )
