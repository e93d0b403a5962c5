"""Answers to lines that are sent before the last line is done."""

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from app_server import address_of, running
from clients import eventually, head, http, raw_connection
from fastapi import FastAPI, Request, Response
from prometheus_client import Counter

from aftexport.errors import InputError
from aftserve.api.error_responses import handle_problems
from aftserve.api.streaming import LINES, classify_lines
from aftserve.http.access_log import AccessLogMiddleware


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
def serving_lines(documents: Documents, seconds: float) -> Iterator[str]:
    app = FastAPI()
    handle_problems(app, {})
    app.add_middleware(
        AccessLogMiddleware,
        responses=Counter("responses", "", ["path", "status", "model"], registry=None),
        names=True,
    )

    @app.post("/infer")
    async def infer(request: Request) -> Response:
        deadline = time.monotonic() + seconds
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
    with serving_lines(documents, 60) as address, httpx.Client(timeout=60) as client:
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
    with serving_lines(documents, 60) as address:
        answer = http.post(f"{address}/infer", content=body("a", "b"))
    assert int(answer.headers["Content-Length"]) == len(answer.content)
    assert details(answer.text.splitlines()) == [(422, "Seen a"), (422, "Seen b")]


@pytest.mark.parametrize(("done", "status"), [({"a", "c"}, 200), (set[str](), 504)])
def test_deadline_ends_remaining_lines(done: set[str], status: int) -> None:
    documents = Documents()
    documents.done |= done
    with serving_lines(documents, 0.5) as address:
        answer = http.post(f"{address}/infer", content=body("a", "b", "c"), timeout=60)
    assert answer.status_code == status
    late = "The request was not answered by its deadline"
    if status == 504:
        assert answer.json()["detail"].startswith(late)
    else:
        expected = [(422, "Seen a"), (504, late), (422, "Seen c")]
        assert details(answer.text.splitlines()) == expected
    assert documents.cancelled == [text for text in "abc" if text not in done]


@contextmanager
def reading_first_line(address: str) -> Iterator[socket.socket]:
    """Yield a connection that has sent three lines and read the first answer."""
    content = body("a", "b", "c")
    with raw_connection(address) as connection:
        connection.sendall(head(len(content)) + content)
        received = b""
        while b"Seen a" not in received:
            received += connection.recv(65536)
        yield connection


def test_disconnect_cancels_remaining_lines() -> None:
    documents = Documents()
    documents.done.add("a")
    with serving_lines(documents, 600) as address:
        with reading_first_line(address):
            pass
        # A closed socket looks like one that only ends its side, until it refuses a line.
        documents.done.add("b")
        eventually(lambda: documents.cancelled == ["c"], "the last line is cancelled")


def test_reset_cancels_remaining_lines() -> None:
    documents = Documents()
    documents.done.add("a")
    with serving_lines(documents, 600) as address:
        with reading_first_line(address) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: documents.cancelled == ["b", "c"], "the other lines are cancelled")
