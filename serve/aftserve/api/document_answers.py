"""The answers for the documents of a request: in one JSON object, in lines or in parts."""

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import Header, Request
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aftserve.api.error_responses import status_of
from aftserve.errors import ClientGoneError, DeadlineError
from aftserve.http.access_log import add_log_fields
from aftserve.http.clients import LoopTurns
from aftserve.model.answers import InlineTokens
from aftserve.model.documents import DocumentAnswer, StreamEnd
from aftserve.model.wanted import NO_OPTIONS, AnswerOptions
from aftserve.schemas import LineProblem
from aftserve.serving.service import Service
from aftserve.types import Document, ExtraFields

logger = logging.getLogger("aftserve.request")

_PART_BYTES = 1 << 16
"""Answers that are done are sent together up to this size."""
T = TypeVar("T")
DeadlineSeconds = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False)] | SkipJsonSchema[None],
    Header(
        alias="Deadline-Seconds",
        description="Maximum seconds until the answer; a lower limit of the server comes first.",
    ),
]


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
    """Classify the documents of a request that has arrived; log and time the answers."""
    service.traces.record("receive", request.state.started, time.monotonic())
    work = service.classify(documents, deadline, given, options=options, inline=inline)
    answers = await run_until_disconnect(work, request.receive, deadline)
    timings = [answer.result.timings for answer in answers]
    stages = {
        "tokenize": max(one.tokenize_seconds for one in timings),
        "queue": max(one.queue_seconds for one in timings),
        "compute": max(one.inference_seconds for one in timings),
    }
    _add_server_timing(request, stages)
    total = sum(answer.result.tokens_total for answer in answers)
    add_log_fields(request, documents=len(answers), tokens=total)
    return answers


async def check_documents(
    request: Request, service: Service, documents: Sequence[Document], deadline: float
) -> None:
    """Check the documents of a request that needs no answers; see ``answer_documents``."""
    service.traces.record("receive", request.state.started, time.monotonic())
    seconds = await run_until_disconnect(service.check(documents), request.receive, deadline)
    _add_server_timing(request, {"tokenize": seconds})


def _add_server_timing(request: Request, stages: Mapping[str, float]) -> None:
    """Add the longest seconds of a document in each stage to the response."""
    value = ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in stages.items())
    request.state.headers[b"server-timing"] = value.encode()


async def complete_json(answer: DocumentAnswer, turns: LoopTurns) -> bytes:
    """Return an answer with every head as JSON; cancellation does not wait for it."""
    # An answer for many tokens takes a tenth of a second, so a thread makes it.
    await turns.take()
    if not answer.tokens.results:
        return _json(answer)
    return await anyio.to_thread.run_sync(_json, answer, abandon_on_cancel=True)


def _json(answer: DocumentAnswer) -> bytes:
    return answer.complete().model_dump_json(exclude_none=True).encode()


def answer_lines(answer: DocumentAnswer, deadline: float) -> Iterator[bytes]:
    """Yield the lines of an answer; at the deadline, a line with the problem ends them."""
    yield _line(answer.result)
    count = 1
    for part in answer.tokens.parts():
        if time.monotonic() > deadline:
            error = DeadlineError()
            yield _line(LineProblem(detail=str(error), status=status_of(error)))
            return
        yield _line(part)
        count += 1
    yield _line(StreamEnd(lines=count))


def _line(content: BaseModel) -> bytes:
    return content.model_dump_json(exclude_none=True).encode() + b"\n"


class LinesResponse(Response):
    """A response with one line for each task, in their order."""

    # At the deadline, the tasks that are not done get a line with status 504. All tasks end with
    # the response, and once the client has left. A closed connection may show at the next line
    # only.

    def __init__(
        self, tasks: Sequence["asyncio.Task[bytes]"], media_type: str, deadline: float
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._tasks = tasks
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines."""
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            part = bytearray()
            for number, task in enumerate(self._tasks):
                if not await self._wait(task, leaving):
                    return
                part += self._line(task)
                following = self._tasks[number + 1 : number + 2]
                if len(part) < _PART_BYTES and all(one.done() for one in following):
                    continue
                await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
                part.clear()
            await send({"type": "http.response.body", "body": bytes(part)})
        finally:
            for one in (leaving, *self._tasks):
                one.cancel()

    async def _wait(self, task: "asyncio.Task[bytes]", leaving: "asyncio.Task[None]") -> bool:
        """Wait for a task until the deadline; return False if the client leaves meanwhile."""
        left = self._deadline - time.monotonic()
        await asyncio.wait({task, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return task.done() or not leaving.done()

    def _line(self, task: "asyncio.Task[bytes]") -> bytes:
        if task.done():
            return task.result()
        error = DeadlineError()
        problem = LineProblem(detail=str(error), status=status_of(error))
        return problem.model_dump_json(exclude_none=True).encode() + b"\n"


class PartsResponse(Response):
    """A response whose parts are made one at a time, so that its memory stays bounded."""

    # Each part is made in a thread, because the tokens of a part can take a tenth of a second. The
    # server makes a part once the client has read most of those before, and none after the client
    # has left. At the deadline it closes the connection, so that the client sees an incomplete
    # body. Parts that end with an error by themselves need no deadline.

    def __init__(
        self,
        parts: Iterator[bytes],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        size: int | None = None,
        deadline: float = math.inf,
    ) -> None:
        super().__init__(media_type=media_type, headers=headers)
        del self.headers["content-length"]
        if size is not None:
            self.headers["content-length"] = str(size)
        self._parts = parts
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while (part := await self._next()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                if leaving.done():
                    return
                if time.monotonic() > self._deadline:
                    logger.warning("an answer was cut off at the deadline of its client")
                    return  # uvicorn closes the connection
            await send({"type": "http.response.body", "body": b""})
        finally:
            leaving.cancel()

    async def _next(self) -> bytes | None:
        """Return the next part; None after the last one. Cancellation does not wait for it."""
        return await anyio.to_thread.run_sync(next, self._parts, None, abandon_on_cancel=True)


def deadline_of(request: Request, seconds: float | None, max_seconds: float) -> float:
    """Return the client's deadline by ``time.monotonic``, counted from its first byte."""
    started: float = request.state.started
    return started + min(seconds or math.inf, max_seconds)


async def run_until_disconnect(
    work: Coroutine[Any, Any, T], receive: Receive, deadline: float
) -> T:
    """Await ``work``; cancel it at the deadline, or once the client disconnects."""
    left = deadline - time.monotonic()
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError if leaving.done() else DeadlineError
    finally:
        for task in (working, leaving):
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client of a request whose body has arrived closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
