"""The HTTP interface."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from aftexport import __version__
from aftexport.errors import AftexportError, EngineError, InputError
from aftserve.errors import ClientGoneError, DocumentTooLongError, RefusedError
from aftserve.presence import while_wanted
from aftserve.receiving import ReceivingLimits
from aftserve.request_log import RequestLog, note
from aftserve.schemas import DocumentResult, InferRequest, InferResponse, Info, Problem, Status
from aftserve.service import Service

logger = logging.getLogger(__name__)

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": description}
    for status, description in {
        408: "The request arrived too slowly.",
        413: "The body or a document is over a limit, or takes longer than the deadline alone.",
        415: "The body is not JSON.",
        422: "The request is malformed, or a document cannot be classified.",
        429: "The queue is too long; Retry-After says when it will not be.",
        500: "The engine fails on this document.",
        503: "The server is not ready, is stopping, or has failed.",
        504: "The deadline passed.",
    }.items()
}
_BODY = {
    "required": True,
    "content": {"application/json": {"schema": InferRequest.model_json_schema()}},
}


class NotJsonError(RefusedError):
    """A body says that it is something else."""

    status = 415


def create_app(service: Service) -> FastAPI:
    """Builds the application around a service; its lifespan runs the scheduler."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(
        title="aftserve",
        version=__version__,
        summary="Long-document classification. No document is ever truncated silently.",
        lifespan=lifespan,
    )
    settings = service.settings
    app.add_middleware(
        ReceivingLimits,
        max_bytes=settings.max_body_bytes,
        max_buffered_bytes=settings.max_buffered_bytes,
        seconds=settings.receive_seconds,
    )
    app.add_middleware(RequestLog, responses=service.metrics.responses)

    async def received(request: Request) -> InferRequest:
        service.check_open()
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise NotJsonError(
                "The body's content type is not application/json.", "Send JSON, and say so."
            )
        try:
            return InferRequest.model_validate_json(await request.body())
        except ClientDisconnect:
            raise ClientGoneError from None
        except ValidationError as error:
            raise RequestValidationError(error.errors(include_url=False)) from error

    @app.post("/infer", responses=_PROBLEMS, openapi_extra={"requestBody": _BODY})
    async def infer(
        request: Request,
        documents: Annotated[InferRequest, Depends(received)],
        deadline_seconds: Annotated[
            float | None,
            Header(
                alias="Deadline-Seconds", gt=0, allow_inf_nan=False,
                description="Most seconds until the answer; the server's limit comes first.",
            ),
        ] = None,
    ) -> DocumentResult | InferResponse:  # fmt: skip
        """Classifies one document (`text`) or several (`texts`, `input_ids`)."""
        most = service.settings.deadline_seconds
        seconds = most if deadline_seconds is None else min(deadline_seconds, most)
        deadline = request.state.started + seconds
        results = await while_wanted(
            service.classify(documents, deadline), request.receive, deadline
        )
        note(request, documents=len(results), tokens=sum(r.tokens_total for r in results))
        return results[0] if documents.text is not None else InferResponse(results=results)

    @app.get("/healthz")
    async def healthz() -> Status:
        """The process is alive."""
        return Status(status="alive")

    @app.get("/readyz", responses={503: {"model": Status}})
    async def readyz(response: Response) -> Status:
        """Requests are wanted: the model answers, and the server is not about to stop."""
        response.status_code = 200 if service.health.ready else 503
        return Status(status=service.health.status)

    @app.get("/info")
    async def info() -> Info:
        """The model, the limits, and what a document costs on this machine."""
        return service.info()

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Everything counted, in the text format of Prometheus."""
        return Response(service.metrics.exposition(), media_type=service.metrics.content_type)

    @app.exception_handler(InputError)
    async def input_error(request: Request, error: InputError) -> JSONResponse:
        return _problem(error, 413 if isinstance(error, DocumentTooLongError) else 422)

    @app.exception_handler(RefusedError)
    async def refused(request: Request, error: RefusedError) -> JSONResponse:
        return _problem(error, error.status, error.retry_after)

    @app.exception_handler(EngineError)
    async def engine_error(request: Request, error: EngineError) -> JSONResponse:
        logger.error("%s", error)
        return _problem(error, 500)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": "; ".join(map(_describe, error.errors()[:5]))}, 422)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": "The server has a fault. Its log says which."}, 500)

    return app


def _problem(error: AftexportError, status: int, retry_after: int | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse({"detail": str(error)}, status, headers)


def _describe(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "header"))
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
