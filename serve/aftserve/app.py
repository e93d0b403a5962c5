"""The HTTP interface."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.middleware.cors import CORSMiddleware

from aftexport import __version__
from aftserve.api import deadline as deadlines
from aftserve.api import request_body, streaming
from aftserve.api.api_keys import Keys
from aftserve.api.deadline import DeadlineSeconds, while_wanted
from aftserve.api.error_responses import GUARDED, handle_problems, responses
from aftserve.api.info import describe
from aftserve.api.open_inference import routes as open_inference
from aftserve.api.openapi import describe_bodies
from aftserve.api.openapi_body import takes
from aftserve.api.origin_check import named_host, same_origin
from aftserve.api.page import routes as page
from aftserve.http.access_log import RequestLog, note
from aftserve.http.body_limits import ReceivingLimits
from aftserve.http.head_requests import HeadRequests
from aftserve.scheduling.job import Backlog
from aftserve.schemas import (
    DocumentRequest,
    DocumentResult,
    InferRequest,
    InferResponse,
    Info,
    ParityCheck,
    ParityReport,
    Problem,
    Reload,
    Status,
)
from aftserve.service import Service

_LINES_SCHEMA: dict[str, Any] = {
    "type": "string",
    "pattern": r"\S",
    "description": "Objects, one a line.",
}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_LINES_CONTENT = dict.fromkeys(streaming.LINES_TYPES, _LINES_SCHEMA)
_INFER = takes(InferRequest, **{streaming.TEXT: _TEXT_SCHEMA}, **_LINES_CONTENT)
_LINES_RESPONSE = {"content": {kind: {"schema": schema} for kind, schema in _LINES_CONTENT.items()}}
EvidenceSpans = Annotated[
    int,
    Query(
        ge=0,
        le=100,
        description="Most passages of each document that speak for its label; 0 for no evidence.",
    ),
]
_METRICS_RESPONSE = {"content": {"text/plain": {"schema": {"type": "string"}}}}


def create_app(service: Service, keys: Keys | None = None, *, replica: bool = False) -> FastAPI:
    """Builds the application around a service; its lifespan runs the scheduler.

    Args:
        service: that classifies.
        keys: of those who may ask; None for everybody.
        replica: of Ray Serve, whose proxy names the responses, and whose next deployment has
            another bundle; else an API key that is marked admin may ask for that.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="aftserve",
        version=__version__,
        summary="Long-document classification. No document is ever truncated silently.",
        lifespan=lifespan,
        # Those pages run the scripts of another host, beside people's API keys, and show nothing
        # where that cannot be reached.
        docs_url=None,
        redoc_url=None,
        # Where TLS ends before this server, a redirect would have a client repeat its request, with
        # its API key, in the clear; and it would go to whatever host the client named.
        redirect_slashes=False,
        # aftserve.observability.tracing configures traces, and metrics have their own address.
        telemetry={
            "tracer_provider": service.traces.provider,
            "tracing": service.traces.provider is not None,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
    )

    def received(request: Request) -> None:
        service.traces.record("receive", request.state.started, time.monotonic())

    settings = service.settings
    app.add_middleware(HeadRequests)
    app.add_middleware(
        ReceivingLimits,
        max_bytes=settings.max_body_bytes,
        max_buffered_bytes=settings.max_buffered_bytes,
        seconds=settings.receive_seconds,
    )
    app.add_middleware(RequestLog, responses=service.metrics.responses, names=not replica)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "Deadline-Seconds",
                "X-API-Key",
                "X-Request-ID",
            ],
            expose_headers=["Retry-After", "X-Request-ID"],
        )
    handle_problems(app)
    problems = responses(Problem)
    # A page that has a key is meant to ask, by whatever name unless some were given.
    by_name = Depends(named_host(settings.host, settings.allowed_hosts))
    if keys is None:
        guards = [by_name, Depends(same_origin(settings.cors_origins))]
    else:
        guards = [*([by_name] if settings.allowed_hosts else []), Depends(keys.dependency())]
    guarded = APIRouter(
        dependencies=guards, responses={status: problems[status] for status in GUARDED}
    )

    def deadline_of(request: Request, seconds: float | None) -> float:
        return deadlines.deadline_of(request, seconds, settings.deadline_seconds)

    @guarded.post(
        "/infer",
        response_model=DocumentResult | InferResponse,
        response_model_exclude_none=True,
        responses={**problems, 200: _LINES_RESPONSE},
        openapi_extra=_INFER,
    )
    async def infer(
        request: Request, deadline_seconds: DeadlineSeconds = None, evidence: EvidenceSpans = 0
    ) -> DocumentResult | InferResponse | Response:
        """Classifies one document, or several.

        JSON has `text`, or `texts` or `input_ids` of several; plain text is one document; of
        newline-delimited JSON each line has `text` or `input_ids`, and a line of the answer.
        """
        service.check_open()
        deadline = deadline_of(request, deadline_seconds)
        most = settings.max_documents
        match kind := request_body.media_type(request):
            case streaming.TEXT:
                text = await streaming.read_text(request, service.model.classifier)
                body = InferRequest(text=text, texts=None, input_ids=None)
            case _ if kind in streaming.LINES_TYPES:
                classify = partial(
                    service.classify, deadline=deadline, spans=evidence, request=Backlog()
                )
                lines = await streaming.classify_lines(
                    request, classify, most=most, deadline=deadline
                )
                note(request, documents=len(lines))
                content = "".join(line.model_dump_json(exclude_none=True) + "\n" for line in lines)
                return Response(content, media_type=kind)
            case _:
                others = (streaming.TEXT, *streaming.LINES_TYPES)
                body = await request_body.read(
                    request, InferRequest, *others, texts=most, input_ids=most
                )
        received(request)
        results = await while_wanted(
            service.classify(body.documents, deadline, spans=evidence), request.receive, deadline
        )
        note(request, documents=len(results), tokens=sum(r.tokens_total for r in results))
        return results[0] if body.text is not None else InferResponse(results=results)

    @guarded.get("/parity")
    async def parity() -> ParityReport:
        """The bundle's own cases with PyTorch's outputs, as run when the server started."""
        return service.parity.report()

    unknown = {"model": Problem, "description": "The server has no PyTorch model."}

    @guarded.post(
        "/parity", responses={**problems, 404: unknown}, openapi_extra=takes(DocumentRequest)
    )
    async def compare(request: Request, deadline_seconds: DeadlineSeconds = None) -> ParityCheck:
        """Classifies a document, and compares every output with PyTorch's."""
        service.check_open()
        most = service.model.classifier.max_tokens
        body = await request_body.read(request, DocumentRequest, input_ids=most)
        deadline = deadline_of(request, deadline_seconds)
        return await while_wanted(
            service.compare(body.document, deadline), request.receive, deadline
        )

    @app.get("/healthz")
    async def healthz() -> Status:
        """The process is alive."""
        return Status(status="alive")

    @app.get("/readyz", responses={503: {"model": Status}})
    async def readyz(response: Response) -> Status:
        """Requests are wanted: the model answers, and the server is not about to stop."""
        response.status_code = 200 if service.health.ready else 503
        return Status(status=service.health.status)

    @guarded.get("/info")
    async def info() -> Info:
        """The model, the limits, and what a document costs on this machine."""
        return describe(service)

    @guarded.get("/metrics", response_class=Response, responses={200: _METRICS_RESPONSE})
    async def metrics() -> Response:
        """Everything counted, in the text format of Prometheus."""
        return Response(service.metrics.exposition(), media_type=service.metrics.content_type)

    if keys is not None and not replica:
        refusals: dict[int | str, dict[str, Any]] = {
            status: problems[status] for status in (401, 429, 503)
        }
        refusals[403] = {"model": Problem, "description": "The API key is not marked admin."}
        refusals[409] = {"model": Problem, "description": "The bundle cannot be used."}

        @app.post(
            "/reload",
            dependencies=[*guards[:-1], Depends(keys.dependency(admin=True))],
            responses=refusals,
        )
        async def reload() -> Reload:
            """Takes the bundle at its path anew; one that cannot be used is refused.

            Requests that were accepted are answered by the one before. Asks for an API key
            that is marked admin.
            """
            return await service.reloading.run()

    app.include_router(guarded)
    app.include_router(open_inference.create_router(service, guards))
    app.include_router(page.create_router())
    describe_bodies(app, service)
    return app
