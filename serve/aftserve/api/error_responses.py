"""Error responses: a status, the problem in one sentence, and the remedy in another."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from aftexport.errors import (
    AftexportError,
    EngineError,
    InputError,
    StorageError,
)
from aftserve.errors import DocumentTooLongError, RefusedError

logger = logging.getLogger("aftserve.problems")

_DESCRIPTIONS = {
    400: "The compressed body is broken.",
    401: "The API key is missing or wrong.",
    403: "The request comes from a page of another origin, or names another host.",
    404: "The model is unknown.",
    408: "The request arrived too slowly, or its body took too long to expand.",
    413: "The body or a document is over a limit, or takes longer than the deadline by itself.",
    415: "The body has another type, or an unknown content encoding.",
    422: "The request is malformed, or a document cannot be classified.",
    429: "The queue or the key's rate is at its limit; Retry-After has the seconds until a retry.",
    500: "The engine failed on this document.",
    503: "The server is not ready, is stopping, or has failed.",
    504: "The deadline passed.",
    507: "The server has no space for a document that runs in chunks.",
}

ErrorBody = Callable[[Exception, int, str], Any]
"""A function that makes the JSON of an error from the error, its status and its message."""
GUARDED = (401, 403, 429)
"""Statuses of every endpoint that is not open to everyone."""


def responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of error responses with a body of ``model``."""
    return {
        status: {"model": model, "description": description}
        for status, description in _DESCRIPTIONS.items()
    }


def handle_problems(app: FastAPI, bodies: Mapping[str, ErrorBody]) -> None:
    """Answer every error with its status, in the format of the route in ``bodies``."""

    def answer(
        request: Request,
        error: Exception,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
    ) -> JSONResponse:
        path = getattr(request.scope.get("route"), "path", "")
        make_body = bodies.get(path, _error_body(request))
        return JSONResponse(make_body(error, status, message), status, headers)

    @app.exception_handler(AftexportError)
    async def known(request: Request, error: AftexportError) -> JSONResponse:
        if isinstance(error, EngineError | StorageError):
            logger.error("%s", error)
        headers = error.headers if isinstance(error, RefusedError) else None
        return answer(request, error, status_of(error), str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return answer(request, error, 422, describe(error))

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers
        if error.status_code == 405:  # the router names only the methods of one route
            headers = {"Allow": ", ".join(_methods(request))}
        return answer(request, error, error.status_code, error.detail, headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # Tell the client that uvicorn closes the connection, or its next request is lost.
        headers = {"Connection": "close"}
        return answer(request, error, 500, "The server failed. See its log.", headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that the path of a request accepts."""
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
    routes = request.app.routes

    def can(method: str) -> bool:
        scope = {**request.scope, "method": "GET" if method == "HEAD" else method}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    return list(filter(can, methods))


def _error_body(request: Request) -> ErrorBody:
    # The Open Inference Protocol names the field differently.
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    name = "error" if path.startswith("/v2") else "detail"
    return lambda error, status, message: {name: message}


def status_of(error: AftexportError) -> int:
    """Return the HTTP status of an error."""
    match error:
        case DocumentTooLongError():
            return 413
        case InputError():
            return 422
        case RefusedError():
            return error.status
        case StorageError():
            return 507
        case _:
            return 500


def describe(error: RequestValidationError) -> str:
    """Describe the first invalid fields of a body."""
    return "; ".join(map(_describe, error.errors()[:5]))


def _describe(error: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "header"))
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
