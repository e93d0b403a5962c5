"""What every refusal looks like: a status, and one sentence of what is wrong and what helps."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from aftexport.errors import AftexportError, EngineError, InputError, StorageError
from aftserve.errors import DocumentTooLongError, RefusedError

logger = logging.getLogger("aftserve.problems")

_DESCRIPTIONS = {
    401: "There is no API key, or a wrong one.",
    403: "A page of another origin asks, or by a name that is not the server's.",
    408: "The request arrived too slowly.",
    413: "The body or a document is over a limit, or takes longer than the deadline alone.",
    415: "The body is of another type, or compressed.",
    422: "The request is malformed, or a document cannot be classified.",
    429: "The queue, or the API key's rate, is at its bound; Retry-After says when to ask again.",
    500: "The engine fails on this document.",
    503: "The server is not ready, is stopping, or has failed.",
    504: "The deadline passed.",
    507: "The server has no space for a document that runs in chunks.",
}

GUARDED = (401, 403, 429)
"""What every address that is not open to all may answer."""


def responses(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """For the description of an interface whose errors look like ``model``."""
    return {
        status: {"model": model, "description": description}
        for status, description in _DESCRIPTIONS.items()
    }


def handle_problems(app: FastAPI) -> None:
    """Has the application answer every error by its status and a sentence."""

    @app.exception_handler(AftexportError)
    async def known(request: Request, error: AftexportError) -> JSONResponse:
        if isinstance(error, EngineError | StorageError):
            logger.error("%s", error)
        headers = error.headers if isinstance(error, RefusedError) else None
        return _problem(request, str(error), status_of(error), headers)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return _problem(request, describe(error), 422)

    @app.exception_handler(HTTPException)
    async def routing_error(request: Request, error: HTTPException) -> JSONResponse:
        headers = error.headers
        if error.status_code == 405:  # the router names the methods of one route alone
            headers = {"Allow": ", ".join(_methods(request))}
        return _problem(request, error.detail, error.status_code, headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # uvicorn closes the connection, where another request would be lost.
        headers = {"Connection": "close"}
        return _problem(request, "The server has a fault. Its log says which.", 500, headers)


def _methods(request: Request) -> list[str]:
    """What can be done with the address of a request."""
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
    routes = request.app.routes

    def can(method: str) -> bool:
        scope = {**request.scope, "method": "GET" if method == "HEAD" else method}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    return list(filter(can, methods))


def _problem(
    request: Request, problem: str, status: int, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    # The Open Inference Protocol has a name of its own for it.
    name = "error" if request.url.path.startswith("/v2") else "detail"
    return JSONResponse({name: problem}, status, headers)


def status_of(error: AftexportError) -> int:
    """The status of the response that says so."""
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
    """What is wrong with the fields of a body."""
    return "; ".join(map(_describe, error.errors()[:5]))


def _describe(error: dict[str, Any]) -> str:
    place = ".".join(str(part) for part in error["loc"] if part not in ("body", "header"))
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
