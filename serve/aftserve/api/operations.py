"""Endpoints for operators: health, metrics, a description of the server, and reload."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response, params

from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.info import describe
from aftserve.api.model_choice import OPEN, ChosenModel, readiness
from aftserve.api.request_body import accepted_type
from aftserve.observability.metrics import OPENMETRICS
from aftserve.schemas import Info, Problem, Reload, Status
from aftserve.serving.repository import ModelRepository

PROBES = ("/healthz", "/readyz", "/metrics")
"""The paths that load balancers and monitors ask every few seconds."""
_METRICS_RESPONSE = {
    "content": {
        kind: {"schema": {"type": "string"}}
        for kind in ("text/plain", "application/openmetrics-text")
    }
}


def create_router(models: ModelRepository, guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoints of health, metrics and the description of the server.

    Args:
        models: the models that are described.
        guards: checks of a request, except to the endpoints of health.
    """
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
        return describe(service)

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
    """Build the endpoint that reloads the bundle.

    Args:
        guards: checks of a request; they require an API key that is marked admin.
    """
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
