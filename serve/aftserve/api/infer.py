"""The endpoint that classifies documents, and JSON lines that it answers one by one."""

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Query, Request, Response, params
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from aftexport.errors import AftexportError, InputError
from aftserve.api.document_answers import (
    DeadlineSeconds,
    LinesResponse,
    PartsResponse,
    answer_documents,
    answer_lines,
    complete_json,
    deadline_of,
    run_until_disconnect,
)
from aftserve.api.error_responses import describe, responses, status_of
from aftserve.api.model_choice import ChosenModel, models_of
from aftserve.api.request_body import (
    BYTES,
    JSON,
    NPY,
    TEXT,
    TEXT_SCHEMA,
    accepted_type,
    body_parts,
    body_schema,
    check_charset,
    checked,
    media_type,
    parse_json,
    read_bytes,
    read_json,
    read_npy,
    read_text,
)
from aftserve.errors import (
    DocumentTooLongError,
    RefusedError,
    document_failures,
)
from aftserve.http.access_log import add_log_fields
from aftserve.model.answers import InlineTokens
from aftserve.model.documents import DocumentAnswer
from aftserve.model.wanted import DEFAULT_SPANS, MAX_CHECKS, MAX_NAMES, SPAN_TOKENS, AnswerOptions
from aftserve.scheduling.batching import Backlog
from aftserve.schemas import (
    DocumentRequest,
    DocumentResult,
    InferRequest,
    InferResponse,
    LineProblem,
    Problem,
)
from aftserve.serving.service import Service
from aftserve.types import Document, ExtraFields

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
_LINES_SCHEMA: dict[str, Any] = {
    "type": "string",
    "pattern": r"\S",
    "description": "JSON objects, one on each line.",
}
_NPY_SCHEMA: dict[str, Any] = {
    "type": "string",
    "format": "binary",
    "description": "A file of numpy.save.",
}
_LINES_CONTENT = dict.fromkeys(LINES_TYPES, _LINES_SCHEMA)
_LINES_RESPONSE = {"content": {kind: {"schema": schema} for kind, schema in _LINES_CONTENT.items()}}
EvidenceSpans = Annotated[
    int,
    Query(
        ge=0,
        le=100,
        description="Maximum passages of each document that support its label; 0 for no evidence, "
        f"or with `explain` or `evidence_check` for up to {DEFAULT_SPANS} passages.",
    ),
]
EvidenceTokens = Annotated[
    Annotated[int, Field(ge=1)] | SkipJsonSchema[None],
    Query(
        description=f"Maximum tokens of a passage, {SPAN_TOKENS} by default. It needs `evidence`, "
        "`explain` or `evidence_check`.",
    ),
]
EvidenceCheck = Annotated[
    int,
    Query(
        ge=0,
        le=MAX_CHECKS,
        description="Number of passages of each label or value to check: the document runs again "
        "without each of them, and `logit_without` of the passage has the result. If no passage "
        "stands out, one is found by further runs.",
    ),
]


def _no_names() -> list[str]:
    """Return a new list, as ``list`` does, whose signature pydantic would parse at each request."""
    return []


Explain = Annotated[
    list[str],
    Query(
        default_factory=_no_names,
        max_length=MAX_NAMES,
        description="Label or value to explain in place of the largest logit, as `NAME` or "
        "`OUTPUT:NAME`; or an output, for the label, labels or values of its answer. The "
        "output must be among `outputs`, if these are given. Repeat it for several. The answer has "
        f"`explained`, with up to {DEFAULT_SPANS} passages of each unless `evidence` has another "
        "number than 0.",
    ),
]
Outputs = Annotated[
    list[str],
    Query(
        default_factory=_no_names,
        max_length=MAX_NAMES,
        description="Output to answer, of `heads` in GET /info. Repeat it for several; without it, "
        "all outputs are answered.",
    ),
]


async def _options(
    explain: Explain,
    outputs: Outputs,
    evidence: EvidenceSpans = 0,
    evidence_tokens: EvidenceTokens = None,
    evidence_check: EvidenceCheck = 0,
) -> AnswerOptions:
    return AnswerOptions(evidence, explain, outputs, evidence_tokens or 0, evidence_check)


Options = Annotated[AnswerOptions, Depends(_options)]
"""The options in the query of a request."""


def create_router(guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoint."""
    router = APIRouter(dependencies=guards)
    router.add_api_route("/infer", infer, methods=["POST"], **INFER)
    return router


INFER: dict[str, Any] = {
    "response_model": DocumentResult | InferResponse,
    "responses": {**responses(Problem), 200: _LINES_RESPONSE},
    "openapi_extra": body_schema(
        InferRequest, **{TEXT: TEXT_SCHEMA, NPY: _NPY_SCHEMA}, **_LINES_CONTENT
    ),
}
"""The description of ``infer`` as a route."""


async def infer(
    request: Request,
    service: ChosenModel,
    options: Options,
    deadline_seconds: DeadlineSeconds = None,
) -> Response:
    """Classify one document, or several.

    JSON has `text`, or `texts`, `input_ids` or `input_features` of several. A model of pairs takes
    `text_pair` beside `text`, and a list of them beside `texts`. Plain text is one
    document, and so are raw bytes for a model of bytes, and a .npy file of token ids or
    features for other models. In newline-delimited JSON each line has `text`, `input_ids` or
    `input_features`, and gets a line of the answer. `inputs` has the extra inputs of a model by
    name, of each document. With `Accept: application/x-ndjson`, the
    answer for one document is streamed as lines: the document, the answers for its tokens in
    parts, and `{"complete": true}`.
    """
    service.check_open()
    tokens = inline_tokens(service, options)  # before the body is read
    deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)
    kind = media_type(request)
    if kind in LINES_TYPES:
        classify = partial(
            service.classify, deadline=deadline, options=options, backlog=Backlog(), inline=tokens
        )
        max_lines = service.settings.max_documents
        return await classify_lines(
            request, classify, kind=kind, max_lines=max_lines, deadline=deadline
        )
    body = await _read(request, kind, service)
    accepted = _accepted_lines(request) if len(body.documents) == 1 else None
    inline = tokens if accepted is None else None
    answers = await answer_documents(
        request,
        service,
        body.documents,
        deadline,
        given=body.given,
        options=options,
        inline=inline,
    )
    if accepted is not None:
        return PartsResponse(answer_lines(answers[0], deadline), accepted)
    field = None if body.is_one else "results"
    return await respond(request, service, answers, deadline, field=field)


def inline_tokens(service: Service, options: AnswerOptions) -> InlineTokens:
    """Return the answers for tokens in one JSON object; InputError for unknown options."""
    wanted = options.wanted(service.active.bundle.manifest)
    return InlineTokens(explained=len(wanted.explained))


async def respond(
    request: Request,
    service: Service,
    answers: Sequence[DocumentAnswer],
    deadline: float,
    *,
    field: str | None,
) -> Response:
    """Return one JSON object: with the answers in a field, or the only answer without one."""

    async def build() -> Response:
        # Answers for tokens are in memory for one document at a time.
        contents = [await complete_json(answer, service.shared.turns) for answer in answers]
        joined = b",".join(contents)
        content = joined if field is None else b'{"%b":[%b]}' % (field.encode(), joined)
        return Response(content, media_type=JSON)

    return await run_until_disconnect(build(), request.receive, deadline)


@dataclass(frozen=True)
class _Body:
    """The content of a request."""

    documents: Sequence[Document]
    is_one: bool
    """Whether the answer is one object instead of a list."""
    given: Sequence[ExtraFields] | None = None


async def _read(request: Request, kind: str, service: Service) -> _Body:
    if kind in (TEXT, BYTES, NPY):
        return _Body([await _read_single(request, kind, service)], is_one=True)
    max_documents = service.settings.max_documents
    body = await read_json(
        request,
        InferRequest,
        other_types=(TEXT, NPY, BYTES, *LINES_TYPES),
        max_entries=dict.fromkeys(
            ("texts", "text_pair", "input_ids", "input_features", "inputs"), max_documents
        ),
    )
    return _Body(body.documents, body.text is not None, body.given)


async def _read_single(request: Request, kind: str, service: Service) -> Document:
    """Return the document of a body that is not JSON."""
    classifier, settings = service.model.classifier, service.settings
    if kind == TEXT:
        classifier.check_text("")  # a model of pairs has no single text
    if extras := classifier.manifest.extra_inputs:
        raise InputError(
            f"Expected JSON with the inputs {', '.join(e.name for e in extras)}, got {kind}.",
            "Send JSON with inputs beside the document.",
        )
    if kind == TEXT:
        return await read_text(request, classifier)
    if kind == BYTES and classifier.takes_bytes:
        return await read_bytes(request, classifier)
    max_bytes = settings.max_body_bytes
    if classifier.manifest.features is not None:
        max_bytes = settings.max_array_bytes
    return await read_npy(request, classifier, service.shared.feature_space, max_bytes)


class _Classify(Protocol):
    """A function that classifies documents with their extra inputs."""

    def __call__(
        self, documents: Sequence[Document], *, given: Sequence[ExtraFields]
    ) -> Coroutine[Any, Any, list[DocumentAnswer]]:
        """Return the answers, in order."""
        ...


def _accepted_lines(request: Request) -> str | None:
    """Return the name of JSON lines in the Accept header of a request; None without one."""
    return accepted_type(request, LINES_TYPES)


async def classify_lines(
    request: Request, classify: _Classify, *, kind: str, max_lines: int, deadline: float
) -> Response:
    """Classify each line as it arrives; a line that fails does not delay the others."""
    # The answer begins once the body has arrived and the first line is done: a client may read
    # nothing before it has sent all. Until then the deadline is an error of the request.
    tasks: list[asyncio.Task[bytes]] = []
    check_charset(request)
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
    await tasks[0]
    # Lines that are done together, such as refused ones, make one answer with a length.
    await asyncio.wait(tasks, timeout=_TOGETHER_SECONDS)


async def _classify_line(request: Request, line: bytes, classify: _Classify) -> bytes:
    try:
        with document_failures(RequestValidationError):
            content = await parse_json(request, line)
            parsed = checked(content, DocumentRequest, {}, request)
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
