"""Bodies that are read as they arrive: one document as text or bytes, or one on each line."""

import asyncio
import codecs
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, Protocol

import anyio.to_thread
import numpy as np
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from aftexport.errors import AftexportError, InputError
from aftserve.api import request_body
from aftserve.api.complete_answer import complete_json
from aftserve.api.deadline import run_until_disconnect
from aftserve.api.error_responses import describe, status_of
from aftserve.api.json_steps import text_bytes
from aftserve.api.lines_response import LinesResponse
from aftserve.api.model_choice import models_of
from aftserve.errors import (
    ClientGoneError,
    DocumentTooLongError,
    RefusedError,
    document_failures,
)
from aftserve.http.access_log import add_log_fields
from aftserve.model.classifier import Classifier
from aftserve.model.document_checks import PIECE_CHARACTERS
from aftserve.model.results import DocumentAnswer
from aftserve.schemas import DocumentRequest, LineProblem
from aftserve.types import Document, ExtraFields, Tokens


class Classify(Protocol):
    """A function that classifies documents with their extra inputs."""

    def __call__(
        self, documents: Sequence[Document], *, given: Sequence[ExtraFields]
    ) -> Coroutine[Any, Any, list[DocumentAnswer]]:
        """Return the answers, in order."""
        ...


TEXT = "text/plain"
BYTES = "application/octet-stream"
LINES = "application/x-ndjson"
_TOGETHER_SECONDS = 0.005
_EMPTY_LINES = re.compile(rb"\n[ \t\r\n]+")
LINES_TYPES = (
    LINES,
    "application/ndjson",
    "application/jsonl",
    "application/x-jsonl",
    "application/jsonlines",
    "application/x-jsonlines",
)
"""Names in use for JSON lines; none of these media types is registered."""


def accepted_lines(request: Request) -> str | None:
    """Return the name of JSON lines in the Accept header of a request; None without one."""
    return request_body.accepted_type(request, LINES_TYPES)


async def read_text(request: Request, classifier: Classifier) -> str:
    """Receive one document, and stop as soon as it has too many tokens.

    Each piece that arrives is tokenized to count its tokens. The complete document is tokenized
    later, as a whole. A byte order mark at its beginning is removed.

    Args:
        request: a request whose body has not been received.
        classifier: the classifier with the tokenizer and the limits.

    Raises:
        NotJsonError: if its headers name another charset, or an unknown encoding.
        InputError: if it is not UTF-8, or the bundle has no tokenizer.
        DocumentTooLongError: if it is over a limit.
        ClientGoneError: if the client left before the end of the body.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    parts, piece, characters, tokens = list[str](), "", 0, 0
    request_body.check_charset(request)
    classifier.check_text("")
    async for content in body_parts(request):
        part = _decoded(decoder, content)
        parts.append(part)
        piece += part
        characters += len(part)
        classifier.check_characters(characters, more=True)
        if len(piece) >= PIECE_CHARACTERS:
            tokens = await anyio.to_thread.run_sync(classifier.count, piece, tokens)
            piece = ""
    parts.append(_decoded(decoder, b"", final=True))
    text = "".join(parts)
    request.state.body.hold_values(text_bytes(text))
    return text


async def read_bytes(request: Request, classifier: Classifier) -> Tokens:
    """Receive one document of raw bytes, and stop as soon as it has too many.

    Args:
        request: a request whose body has not been received.
        classifier: a classifier that takes bytes, with the limits.

    Returns:
        The bytes as token ids.

    Raises:
        NotJsonError: if the encoding of the body is unknown.
        DocumentTooLongError: if it is over the limit.
        ClientGoneError: if the client left before the end of the body.
    """
    document = bytearray()
    async for content in body_parts(request):
        document += content
        classifier.check_length(len(document), more=True)
    request.state.body.hold_values(8 * len(document))
    return np.frombuffer(document, np.uint8).astype(np.int64)


def _decoded(decoder: codecs.IncrementalDecoder, content: bytes, *, final: bool = False) -> str:
    try:
        return decoder.decode(content, final)
    except UnicodeDecodeError as error:
        raise InputError(f"The text is not UTF-8: {error}.", "Send UTF-8.") from None


async def classify_lines(
    request: Request, classify: Classify, *, kind: str, max_lines: int, deadline: float
) -> Response:
    """Classify each line as it arrives; a line that fails does not delay the others.

    Args:
        request: a request whose body has not been received.
        classify: function that classifies documents.
        kind: media type of the answer.
        max_lines: maximum number of lines.
        deadline: the client's deadline by ``time.monotonic``.

    Returns:
        A response with the result or the problem of each line, in order. It begins once the body
        has arrived and the first line is done: a client may read nothing before it has sent all.

    Raises:
        NotJsonError: if its headers name another charset, or an unknown encoding.
        InputError: if there are no lines.
        DocumentTooLongError: if there are too many lines.
        ClientGoneError: if the client left.
        DeadlineError: if the deadline passed before the first line was done.
    """
    tasks: list[asyncio.Task[bytes]] = []
    request_body.check_charset(request)
    try:
        async for line in _lines(request):
            if len(tasks) == max_lines:
                raise DocumentTooLongError(
                    f"A request must have at most {max_lines} lines, got more.",
                    "Send them in several requests.",
                )
            tasks.append(asyncio.create_task(_classify_line(request, line, classify)))
        if not tasks:
            raise InputError("The request has no lines.", 'Send at least one: {"text": "..."}.')
        await run_until_disconnect(_first(tasks), request.receive, deadline)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
    add_log_fields(request, documents=len(tasks))
    if all(task.done() for task in tasks):
        return Response(b"".join(task.result() for task in tasks), media_type=kind)
    return LinesResponse(tasks, kind, deadline)


async def _first(tasks: Sequence[asyncio.Task[bytes]]) -> None:
    await asyncio.wait(tasks[:1])
    # Lines that are done together, such as refused ones, make one answer with a length.
    await asyncio.wait(tasks, timeout=_TOGETHER_SECONDS)


async def _classify_line(request: Request, line: bytes, classify: Classify) -> bytes:
    try:
        with document_failures(RequestValidationError):
            content = await request_body.parse_json(request, line)
            parsed = request_body.checked(content, DocumentRequest, {})
            del content  # an answer needs only the document
            (answer,) = await classify([parsed.document], given=[parsed.inputs or {}])
            return await complete_json(answer, models_of(request).shared.turns) + b"\n"
    except AftexportError as error:
        again = error.retry_after if isinstance(error, RefusedError) else None
        content = LineProblem(detail=str(error), status=status_of(error), retry_after=again)
    except RequestValidationError as error:
        content = LineProblem(detail=describe(error), status=422)
    return content.model_dump_json(exclude_none=True).encode() + b"\n"


async def _lines(request: Request) -> AsyncIterator[bytes]:
    line = bytearray()
    async for content in body_parts(request):
        # A part of a body can have thousands of empty lines.
        first, *others = _EMPTY_LINES.sub(b"\n", content).split(b"\n")
        line += first
        for other in others:
            if line.strip():
                yield bytes(line)
            line = bytearray(other)
    if line.strip():
        yield bytes(line)


async def body_parts(request: Request) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive.

    Raises:
        NotJsonError: if its encoding is unknown.
        ClientGoneError: if the client left before its end.
    """
    request_body.check_encoding(request)
    try:
        async for content in request.stream():
            yield content
    except ClientDisconnect:
        raise ClientGoneError from None
