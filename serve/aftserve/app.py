"""The HTTP interface."""

import logging
import time
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from aftexport import __version__
from aftexport.errors import EngineError, InputError
from aftserve.classifier import Classifier, DocumentTooLongError
from aftserve.schemas import (
    DocumentResult,
    InferRequest,
    InferResponse,
    Problem,
    Status,
    Timings,
)

logger = logging.getLogger("aftserve")


def create_app(classifier: Classifier) -> FastAPI:
    """Builds the application around a loaded classifier."""
    app = FastAPI(
        title="aftserve",
        version=__version__,
        summary="Long-document classification. No document is ever truncated silently.",
    )
    # The engine uses every core for one document; a second at once would slow both.
    engine_turn = anyio.CapacityLimiter(1)

    async def tokenize(request: InferRequest) -> list[tuple[list[int], float]]:
        if request.input_ids is not None:
            return [(ids, 0.0) for ids in request.input_ids]
        texts = [request.text] if request.text is not None else request.texts or []
        tokenized = []
        for text in texts:
            start = time.perf_counter()
            ids = await anyio.to_thread.run_sync(classifier.tokenize, text)
            tokenized.append((ids, time.perf_counter() - start))
        return tokenized

    async def answer(ids: list[int], tokenize_seconds: float) -> DocumentResult:
        queued = time.perf_counter()
        async with engine_turn:
            queue_seconds = time.perf_counter() - queued
            result = await anyio.to_thread.run_sync(classifier.classify, ids)
        return DocumentResult(
            label=result.label,
            scores=result.scores,
            tokens_total=len(ids),
            tokens_used=result.tokens,
            truncated=result.tokens < len(ids),
            timings=Timings(
                tokenize_seconds=tokenize_seconds,
                queue_seconds=queue_seconds,
                inference_seconds=result.inference_seconds,
            ),
        )

    @app.post(
        "/infer",
        responses={413: {"model": Problem}, 422: {"model": Problem}, 500: {"model": Problem}},
    )
    async def infer(request: InferRequest) -> DocumentResult | InferResponse:
        """Classifies one document (`text`) or several (`texts`, `input_ids`)."""
        documents = await tokenize(request)
        # All are checked before the first is run: a request is answered whole or not at all.
        for index, (ids, _) in enumerate(documents):
            try:
                classifier.check(ids)
            except InputError as error:
                problem = f"document {index}: {error.problem}"
                raise type(error)(problem, error.remedy) from error
        results = [await answer(ids, seconds) for ids, seconds in documents]
        return results[0] if request.text is not None else InferResponse(results=results)

    @app.get("/healthz")
    async def healthz() -> Status:
        """The process is alive."""
        return Status(status="alive")

    @app.get("/readyz")
    async def readyz() -> Status:
        """The model is loaded and answers."""
        return Status(status="ready")

    @app.exception_handler(InputError)
    async def input_error(request: Request, error: InputError) -> JSONResponse:
        status = 413 if isinstance(error, DocumentTooLongError) else 422
        return JSONResponse({"detail": str(error)}, status)

    @app.exception_handler(EngineError)
    async def engine_error(request: Request, error: EngineError) -> JSONResponse:
        logger.error("%s", error)
        return JSONResponse({"detail": str(error)}, 500)

    @app.exception_handler(RequestValidationError)
    async def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": "; ".join(map(_describe, error.errors()[:5]))}, 422)

    return app


def _describe(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']} at character {error['loc'][-1]}"
    place = ".".join(str(part) for part in error["loc"] if part != "body")
    message = error["msg"].removeprefix("Value error, ")
    return f"{place}: {message}" if place else message
