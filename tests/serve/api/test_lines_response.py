"""Answers to lines that are sent before the last line is done."""

import asyncio
import json
import math
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
from clients import eventually, head, http, raw_connection
from fastapi import FastAPI, Request, Response
from prometheus_client import Counter
from servers import address_of, running

from aftexport.errors import InputError
from aftserve.api.document_answers import LinesResponse
from aftserve.api.error_responses import handle_problems
from aftserve.api.infer import LINES, classify_lines
from aftserve.http.access_log import AccessLogMiddleware
from aftserve.http.body_limits import BodyLimitMiddleware
from aftserve.serving.service import SharedResources
from aftserve.settings import Settings

LATE = "The request was not answered by its deadline"


class Documents:
    """Documents that are done once a test says so; their answer is a refusal.

    Attributes:
        done: the documents that are done.
        cancelled: the documents whose classification was cancelled.
    """

    def __init__(self) -> None:
        self.done = set[str]()
        self.cancelled = list[str]()

    async def classify(self, documents: Sequence[Any], *, given: Any) -> Any:
        (text,) = documents
        try:
            while text not in self.done:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled.append(text)
            raise
        raise InputError(f"Seen {text}.", "Nothing.")


@contextmanager
def serving_lines(documents: Documents, deadline: float = math.inf) -> Iterator[str]:
    app = FastAPI()
    app.state.models = SimpleNamespace(shared=SharedResources(Settings()))
    handle_problems(app, {})
    app.add_middleware(
        BodyLimitMiddleware, max_bytes=1 << 20, max_buffered_bytes=1 << 20, seconds=60
    )
    app.add_middleware(
        AccessLogMiddleware,
        responses=Counter("responses", "", ["path", "status", "model"], registry=None),
        names=True,
    )

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        return await classify_lines(
            request, documents.classify, kind=LINES, max_lines=100, deadline=deadline
        )

    with running(app) as server:
        yield address_of(server)


def body(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def details(lines: Sequence[str]) -> list[tuple[int, str]]:
    found = map(json.loads, lines)
    return [(one["status"], one["detail"].partition(".")[0]) for one in found]


def test_done_line_is_sent_before_others() -> None:
    documents = Documents()
    documents.done |= {"a", "b", "d"}
    with serving_lines(documents) as address, httpx.Client(timeout=60) as client:
        content = body("a", "b", "c", "d", "e")
        with client.stream("POST", f"{address}/infer", content=content) as answer:
            lines = answer.iter_lines()
            assert details([next(lines), next(lines)]) == [(422, "Seen a"), (422, "Seen b")]
            documents.done.add("c")
            assert details([next(lines), next(lines)]) == [(422, "Seen c"), (422, "Seen d")]
            documents.done.add("e")
            assert details([*lines]) == [(422, "Seen e")]
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert not documents.cancelled


def test_lines_done_together_have_length() -> None:
    documents = Documents()
    documents.done |= {"a", "b"}
    with serving_lines(documents) as address:
        answer = http.post(f"{address}/infer", content=body("a", "b"))
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    assert details(answer.text.splitlines()) == [(422, "Seen a"), (422, "Seen b")]


def test_deadline_before_first_line_is_error() -> None:
    documents = Documents()
    with serving_lines(documents, deadline=time.monotonic() + 1) as address:
        answer = http.post(f"{address}/infer", content=body("a", "b", "c"), timeout=60)
    assert answer.status_code == 504
    assert answer.json()["detail"].startswith(LATE)
    assert sorted(documents.cancelled) == ["a", "b", "c"]


def test_deadline_ends_remaining_lines() -> None:
    """Lines that are done are sent after the deadline, also behind one that is not."""
    messages = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        messages.append(message)

    async def line(text: str) -> bytes:
        if text == "b":
            await receive()
        return json.dumps({"status": 422, "detail": f"Seen {text}."}).encode() + b"\n"

    async def scenario() -> None:
        tasks = [asyncio.create_task(line(text)) for text in "abc"]
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True, False, True]
        await LinesResponse(tasks, LINES, deadline=-math.inf)({"type": "http"}, receive, send)
        await asyncio.wait(tasks)
        assert [task.cancelled() for task in tasks] == [False, True, False]

    asyncio.run(scenario())
    lines = b"".join(message["body"] for message in messages[1:]).decode().splitlines()
    assert details(lines) == [(422, "Seen a"), (504, LATE), (422, "Seen c")]


@contextmanager
def reading_first_line(address: str) -> Iterator[socket.socket]:
    """Yield a connection that has sent three lines and read the first answer."""
    content = body("a", "b", "c")
    with raw_connection(address) as connection:
        connection.sendall(head(len(content)) + content)
        received = b""
        while b"Seen a" not in received:
            part = connection.recv(65536)
            assert part, received
            received += part
        yield connection


def test_disconnect_cancels_remaining_lines() -> None:
    documents = Documents()
    documents.done.add("a")
    with serving_lines(documents) as address:
        with reading_first_line(address):
            pass
        # A closed socket looks like one that only ends its side, until it refuses a line.
        documents.done.add("b")
        eventually(lambda: documents.cancelled == ["c"], "the last line is cancelled")


def test_reset_cancels_remaining_lines() -> None:
    documents = Documents()
    documents.done.add("a")
    with serving_lines(documents) as address:
        with reading_first_line(address) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: documents.cancelled == ["b", "c"], "the other lines are cancelled")
