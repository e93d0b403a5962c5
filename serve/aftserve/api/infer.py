"""The endpoint that classifies documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response, params

from aftexport.errors import InputError
from aftserve.api import streaming
from aftserve.api.answer_lines import answer_lines
from aftserve.api.complete_answer import complete_json
from aftserve.api.deadline import DeadlineSeconds, deadline_of, run_until_disconnect
from aftserve.api.document_answers import answer_documents
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.model_choice import ChosenModel
from aftserve.api.npy_body import NPY, read_npy
from aftserve.api.openapi_body import body_schema
from aftserve.api.parts_response import PartsResponse
from aftserve.api.request_body import JSON, media_type, read_json
from aftserve.http.loop_turns import LoopTurns
from aftserve.model.inline_limit import InlineTokens
from aftserve.model.results import DocumentAnswer
from aftserve.model.wanted import DEFAULT_SPANS, MAX_NAMES, AnswerOptions
from aftserve.scheduling.job import Backlog
from aftserve.schemas import DocumentResult, InferRequest, InferResponse, Problem
from aftserve.serving.service import Service
from aftserve.types import Document, ExtraFields

_LINES_SCHEMA: dict[str, Any] = {
    "type": "string",
    "pattern": r"\S",
    "description": "JSON objects, one on each line.",
}
_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_NPY_SCHEMA: dict[str, Any] = {
    "type": "string",
    "format": "binary",
    "description": "A file of numpy.save.",
}
_LINES_CONTENT = dict.fromkeys(streaming.LINES_TYPES, _LINES_SCHEMA)
_INFER = body_schema(
    InferRequest, **{streaming.TEXT: _TEXT_SCHEMA, NPY: _NPY_SCHEMA}, **_LINES_CONTENT
)
_LINES_RESPONSE = {"content": {kind: {"schema": schema} for kind, schema in _LINES_CONTENT.items()}}
EvidenceSpans = Annotated[
    int,
    Query(
        ge=0,
        le=100,
        description="Maximum passages of each document that support its label; 0 for no evidence, "
        f"or with `explain` for up to {DEFAULT_SPANS} passages.",
    ),
]
Explain = Annotated[
    list[str],
    Query(
        default_factory=list,
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
        default_factory=list,
        max_length=MAX_NAMES,
        description="Output to answer, of `heads` in GET /info. Repeat it for several; without it, "
        "all outputs are answered.",
    ),
]


def create_router(guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoint.

    Args:
        guards: checks of a request.
    """
    problems = responses(Problem)
    router = APIRouter(
        dependencies=guards, responses={status: problems[status] for status in GUARDED}
    )

    @router.post(
        "/infer",
        response_model=DocumentResult | InferResponse,
        responses={**problems, 200: _LINES_RESPONSE},
        openapi_extra=_INFER,
    )
    async def infer(
        request: Request,
        service: ChosenModel,
        explain: Explain,
        outputs: Outputs,
        deadline_seconds: DeadlineSeconds = None,
        evidence: EvidenceSpans = 0,
    ) -> Response:
        """Classify one document, or several.

        JSON has `text`, or `texts`, `input_ids` or `input_features` of several. Plain text is one
        document, and so are raw bytes for a model of bytes, and a .npy file of token ids or
        features for other models. In newline-delimited JSON each line has `text`, `input_ids` or
        `input_features`, and gets a line of the answer. `inputs` has the extra inputs of a model by
        name, of each document. With `Accept: application/x-ndjson`, the
        answer for one document is streamed as lines: the document, the answers for its tokens in
        parts, and `{"complete": true}`.
        """
        options = AnswerOptions(evidence, explain, outputs)
        return await _answer(request, service, options, deadline_seconds)

    return router


async def _answer(
    request: Request, service: Service, options: AnswerOptions, deadline_seconds: float | None
) -> Response:
    """Return the answer to a request."""
    service.check_open()
    wanted = options.wanted(service.active.bundle.manifest)  # before the body is read
    tokens = InlineTokens(explained=len(wanted.explained))
    deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)
    kind = media_type(request)
    if kind in streaming.LINES_TYPES:
        classify = partial(
            service.classify, deadline=deadline, options=options, backlog=Backlog(), inline=tokens
        )
        max_lines = service.settings.max_documents
        return await streaming.classify_lines(
            request, classify, kind=kind, max_lines=max_lines, deadline=deadline
        )
    body = await _read(request, kind, service)
    accepted = streaming.accepted_lines(request) if len(body.documents) == 1 else None
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
    building = _respond(answers, service.shared.turns, is_one=body.is_one)
    return await run_until_disconnect(building, request.receive, deadline)


async def _respond(
    answers: Sequence[DocumentAnswer], turns: LoopTurns, *, is_one: bool
) -> Response:
    """Return a response; answers for tokens are in memory for one document at a time."""
    contents = [await complete_json(answer, turns) for answer in answers]
    content = contents[0] if is_one else b'{"results":[' + b",".join(contents) + b"]}"
    return Response(content, media_type=JSON)


@dataclass(frozen=True)
class _Body:
    """The content of a request.

    Attributes:
        documents: the documents.
        is_one: whether the answer is one object instead of a list.
        given: the extra inputs of each document; None without any.
    """

    documents: Sequence[Document]
    is_one: bool
    given: Sequence[ExtraFields] | None = None


async def _read(request: Request, kind: str, service: Service) -> _Body:
    if kind in (streaming.TEXT, streaming.BYTES, NPY):
        return _Body([await _read_single(request, kind, service)], is_one=True)
    max_documents = service.settings.max_documents
    body = await read_json(
        request,
        InferRequest,
        other_types=(streaming.TEXT, NPY, streaming.BYTES, *streaming.LINES_TYPES),
        max_entries=dict.fromkeys(
            ("texts", "input_ids", "input_features", "inputs"), max_documents
        ),
    )
    return _Body(body.documents, body.text is not None, body.given)


async def _read_single(request: Request, kind: str, service: Service) -> Document:
    """Return the document of a body that is not JSON."""
    classifier, settings = service.model.classifier, service.settings
    if extras := classifier.manifest.extra_inputs:
        raise InputError(
            f"Expected JSON with the inputs {', '.join(e.name for e in extras)}, got {kind}.",
            "Send JSON with inputs beside the document.",
        )
    if kind == streaming.TEXT:
        return await streaming.read_text(request, classifier)
    if kind == streaming.BYTES and classifier.takes_bytes:
        return await streaming.read_bytes(request, classifier)
    max_bytes = settings.max_body_bytes
    if classifier.manifest.features is not None:
        max_bytes = settings.max_array_bytes
    return await read_npy(request, classifier, service.shared.feature_space, max_bytes)
