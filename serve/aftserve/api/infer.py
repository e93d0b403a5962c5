"""The endpoint that classifies documents."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response, params

from aftserve.api import streaming
from aftserve.api.answer_lines import answer_lines
from aftserve.api.complete_answer import complete_json
from aftserve.api.deadline import DeadlineSeconds, deadline_of, run_until_disconnect
from aftserve.api.error_responses import GUARDED, responses
from aftserve.api.npy_body import NPY, read_npy
from aftserve.api.openapi_body import body_schema
from aftserve.api.parts_response import PartsResponse
from aftserve.api.request_body import JSON, media_type, read_json
from aftserve.http.access_log import add_log_fields
from aftserve.model.inline_limit import InlineTokens
from aftserve.model.results import DocumentAnswer
from aftserve.scheduling.job import Backlog
from aftserve.schemas import DocumentResult, InferRequest, InferResponse, Problem
from aftserve.service import Service
from aftserve.types import Document

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
        description="Maximum passages of each document that support its label; 0 for no evidence.",
    ),
]


def create_router(service: Service, guards: Sequence[params.Depends]) -> APIRouter:
    """Build the endpoint.

    Args:
        service: the service that classifies.
        guards: checks of a request.
    """
    problems = responses(Problem)
    router = APIRouter(
        dependencies=guards, responses={status: problems[status] for status in GUARDED}
    )

    @router.post(
        "/infer",
        response_model=DocumentResult | InferResponse,
        response_model_exclude_none=True,
        responses={**problems, 200: _LINES_RESPONSE},
        openapi_extra=_INFER,
    )
    async def infer(
        request: Request, deadline_seconds: DeadlineSeconds = None, evidence: EvidenceSpans = 0
    ) -> DocumentResult | InferResponse | Response:
        """Classify one document, or several.

        JSON has `text`, or `texts`, `input_ids` or `input_features` of several. Plain text is one
        document, and so are raw bytes for a model of bytes, and a .npy file of token ids or
        features for other models. In newline-delimited JSON each line has `text`, `input_ids` or
        `input_features`, and gets a line of the answer. With `Accept: application/x-ndjson`, the
        answer for one document is streamed as lines: the document, the answers for its tokens in
        parts, and `{"complete": true}`.
        """
        service.check_open()
        deadline = deadline_of(request, deadline_seconds, service.settings.deadline_seconds)
        kind = media_type(request)
        if kind in streaming.LINES_TYPES:
            classify = partial(
                service.classify,
                deadline=deadline,
                spans=evidence,
                backlog=Backlog(),
                inline=InlineTokens(),
            )
            lines = await streaming.classify_lines(
                request, classify, max_lines=service.settings.max_documents, deadline=deadline
            )
            add_log_fields(request, documents=len(lines))
            return Response(b"".join(lines), media_type=kind)
        documents, is_one = await _read(request, kind, service)
        service.traces.record("receive", request.state.started, time.monotonic())
        accepted = streaming.accepted_lines(request) if len(documents) == 1 else None
        inline = InlineTokens() if accepted is None else None
        work = service.classify(documents, deadline, spans=evidence, inline=inline)
        answers = await run_until_disconnect(work, request.receive, deadline)
        tokens = sum(answer.result.tokens_total for answer in answers)
        add_log_fields(request, documents=len(answers), tokens=tokens)
        if accepted is not None:
            return PartsResponse(answer_lines(answers[0], deadline), accepted)
        if any(answer.tokens.results for answer in answers):
            building = _with_tokens(answers, is_one)
            return await run_until_disconnect(building, request.receive, deadline)
        results = [answer.result for answer in answers]
        return results[0] if is_one else InferResponse(results=results)

    return router


async def _with_tokens(answers: Sequence[DocumentAnswer], is_one: bool) -> Response:
    """Return a response with answers for tokens, which are in memory for one document at a time."""
    contents = [await complete_json(answer) for answer in answers]
    content = contents[0] if is_one else b'{"results":[' + b",".join(contents) + b"]}"
    return Response(content, media_type=JSON)


async def _read(request: Request, kind: str, service: Service) -> tuple[Sequence[Document], bool]:
    """Return the documents of a body, and whether the answer is one object instead of a list."""
    classifier = service.model.classifier
    if kind == streaming.TEXT:
        return [await streaming.read_text(request, classifier)], True
    if kind == streaming.BYTES and classifier.takes_bytes:
        return [await streaming.read_bytes(request, classifier)], True
    if kind in (NPY, streaming.BYTES):
        settings = service.settings
        max_bytes = settings.max_body_bytes
        if classifier.manifest.features is not None:
            max_bytes = settings.max_array_bytes
        return [await read_npy(request, classifier, service.feature_space, max_bytes)], True
    max_documents = service.settings.max_documents
    body = await read_json(
        request,
        InferRequest,
        other_types=(streaming.TEXT, NPY, streaming.BYTES, *streaming.LINES_TYPES),
        max_entries=dict.fromkeys(("texts", "input_ids", "input_features"), max_documents),
    )
    return body.documents, body.text is not None
