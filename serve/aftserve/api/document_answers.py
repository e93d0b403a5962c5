"""The answers for the documents of a request, the same for every format."""

import time
from collections.abc import Sequence

from fastapi import Request

from aftserve.api.deadline import run_until_disconnect
from aftserve.api.server_timing import add_server_timing
from aftserve.http.access_log import add_log_fields
from aftserve.model.inline_limit import InlineTokens
from aftserve.model.results import DocumentAnswer
from aftserve.model.wanted import NO_OPTIONS, AnswerOptions
from aftserve.serving.service import Service
from aftserve.types import Document, ExtraFields


async def answer_documents(
    request: Request,
    service: Service,
    documents: Sequence[Document],
    deadline: float,
    *,
    given: Sequence[ExtraFields] | None = None,
    options: AnswerOptions = NO_OPTIONS,
    inline: InlineTokens | None = None,
) -> list[DocumentAnswer]:
    """Classify the documents of a request whose body has arrived, and log and time the answers.

    Args:
        request: the request.
        service: the service that classifies.
        documents: all documents of the request, at least one.
        deadline: the client's deadline by ``time.monotonic``.
        given: the extra inputs of each document; None for none.
        options: options of the request for its answers.
        inline: the tokens whose answers are part of JSON objects; see ``Service.classify``.

    Raises:
        ClientGoneError: if the client closed its connection.
        DeadlineError: if the deadline passed.
        AftexportError: for the reasons of ``Service.classify``.
    """
    service.traces.record("receive", request.state.started, time.monotonic())
    work = service.classify(documents, deadline, given, options=options, inline=inline)
    answers = await run_until_disconnect(work, request.receive, deadline)
    timings = [answer.result.timings for answer in answers]
    stages = {
        "tokenize": max(one.tokenize_seconds for one in timings),
        "queue": max(one.queue_seconds for one in timings),
        "compute": max(one.inference_seconds for one in timings),
    }
    add_server_timing(request, stages)
    total = sum(answer.result.tokens_total for answer in answers)
    add_log_fields(request, documents=len(answers), tokens=total)
    return answers


async def check_documents(
    request: Request, service: Service, documents: Sequence[Document], deadline: float
) -> None:
    """Check the documents of a request that needs no answers; see ``answer_documents``."""
    service.traces.record("receive", request.state.started, time.monotonic())
    seconds = await run_until_disconnect(service.check(documents), request.receive, deadline)
    add_server_timing(request, {"tokenize": seconds})
