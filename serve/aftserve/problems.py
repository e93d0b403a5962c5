"""What every refusal looks like: a status, and one sentence of what is wrong and what helps."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from aftexport.errors import AftexportError, EngineError, InputError
from aftserve.errors import DocumentTooLongError, RefusedError
from aftserve.schemas import Problem

logger = logging.getLogger(__name__)

RESPONSES: dict[int | str, dict[str, Any]] = {
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
"""For the description of the interface."""


def handle_problems(app: FastAPI) -> None:
    """Has the application answer every error by its status and a sentence."""

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


def _problem(error: AftexportError, status: int, retry_after: int | None = None) -> JSONResponse:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse({"detail": str(error)}, status, headers)


def _describe(error: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "header"))
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
