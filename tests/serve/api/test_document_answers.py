"""Answers in lines and in parts: they end with their parts, their client, or the deadline."""

import asyncio
import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from clients import eventually, head, http, raw_connection
from fastapi import FastAPI, Request, Response
from prometheus_client import Counter
from served_heads import TAGGER, answer_of
from servers import address_of, running

from aftexport.errors import InputError
from aftexport.heads import FeatureExtraction
from aftexport.heads.token_classification import TokenLabels
from aftserve.api.document_answers import (
    LinesResponse,
    PartsResponse,
    answer_lines,
    complete_json,
    run_until_disconnect,
)
from aftserve.api.error_responses import handle_problems
from aftserve.api.infer import LINES, classify_lines
from aftserve.errors import DeadlineError
from aftserve.http.access_log import AccessLogMiddleware
from aftserve.http.body_limits import BodyLimitMiddleware
from aftserve.http.clients import LoopTurns
from aftserve.model.documents import DocumentAnswer
from aftserve.serving.service import SharedResources
from aftserve.settings import Settings


async def stay() -> dict[str, Any]:
    """Receive nothing, as from a client that stays."""
    await asyncio.Event().wait()
    return {}


async def sent(response: PartsResponse, *, leaves: bool = False) -> list[dict[str, Any]]:
    """Return the messages of a response to a client that stays or leaves."""
    messages = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"} if leaves else await stay()

    async def send(message: Any) -> None:
        messages.append(message)

    await response({"type": "http"}, receive, send)
    return messages


def bodies(messages: list[dict[str, Any]]) -> list[bytes]:
    return [message["body"] for message in messages[1:]]


@pytest.mark.parametrize("seconds", [math.inf, 1000])
def test_all_parts_are_sent(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    response = PartsResponse(iter([b"ab", b"c"]), "text/plain", size=3, deadline=deadline)
    messages = asyncio.run(sent(response))
    assert bodies(messages) == [b"ab", b"c", b""]
    assert (b"content-length", b"3") in messages[0]["headers"]


@pytest.mark.parametrize("leaves", [False, True])
def test_deadline_or_departure_ends_parts(leaves: bool) -> None:
    made = list[int]()

    def parts() -> Iterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield b"part"

    deadline = math.inf if leaves else -math.inf
    messages = asyncio.run(
        sent(PartsResponse(parts(), "text/plain", size=4000, deadline=deadline), leaves=leaves)
    )
    # Without the last message, uvicorn closes the connection, and the client misses bytes.
    assert b"" not in bodies(messages)
    assert len(made) < 5


def test_threads_make_parts_in_order() -> None:
    """A part of many tokens would stop the event loop."""
    threads = list[int]()

    def parts() -> Iterator[bytes]:
        for number in range(20):
            threads.append(threading.get_ident())
            yield bytes([number])

    messages = asyncio.run(sent(PartsResponse(parts(), "text/plain")))
    assert bodies(messages) == [*(bytes([number]) for number in range(20)), b""]
    assert threading.get_ident() not in threads


def test_part_is_made_after_one_before_is_sent() -> None:
    made = list[int]()

    def parts() -> Iterator[bytes]:
        for number in range(10):
            made.append(number)
            yield b"part"

    async def send(message: Any) -> None:
        before = len(made)
        await asyncio.sleep(0.005)  # a client that reads slowly
        assert len(made) == before
        assert message["type"] == "http.response.start" or made

    asyncio.run(PartsResponse(parts(), "text/plain")({"type": "http"}, stay, send))
    assert made == [*range(10)]


def test_cancellation_does_not_wait_for_part() -> None:
    go_on, begun = threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        begun.set()
        assert go_on.wait(60)
        yield b"part"

    async def scenario() -> None:
        sending = asyncio.create_task(sent(PartsResponse(parts(), "text/plain")))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        sending.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await sending
        finally:
            go_on.set()

    asyncio.run(scenario())


def lines_of(answer: DocumentAnswer, deadline: float = math.inf) -> list[dict[str, Any]]:
    lines = list(answer_lines(answer, deadline))
    assert all(line.endswith(b"\n") and line.count(b"\n") == 1 for line in lines)
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("tokens", [1, 4096, 4097, 10_000])
def test_parts_are_whole_answer(tokens: int) -> None:
    answer = answer_of(TAGGER, tokens)
    first, *parts, end = lines_of(answer)
    assert first["tokens_used"] == tokens
    assert end == {"complete": True, "lines": 1 + len(parts)}
    labels = [part for part in parts if "labels" in part]
    assert [part["start_token"] for part in labels] == list(range(0, tokens, 4096))
    whole = json.loads(answer.complete().model_dump_json(exclude_none=True))["heads"]["head"]
    for field in ("labels", "scores"):
        assert [*chain.from_iterable(part[field] for part in labels)] == whole[field]
    assert [*chain.from_iterable(part.get("spans", ()) for part in parts)] == whole["spans"]


def test_wide_vectors_make_short_lines() -> None:
    head = FeatureExtraction(dimensions=768, per_token=True)
    _, *parts, _ = lines_of(answer_of(head, 50))
    assert [len(part["vectors"]) for part in parts] == [21, 21, 8]
    assert max(len(part["vectors"]) * 768 for part in parts) <= 1 << 14


def test_tokens_count_from_document_start() -> None:
    cut, whole = answer_of(TAGGER, 5000, first=700), answer_of(TAGGER, 5000)
    assert [part.get("start_token") for part in lines_of(cut)[1:-1] if "labels" in part] == [
        700, 4796
    ]  # fmt: skip
    spans = (one.tokens.all_spans("head") for one in (cut, whole))
    for ours, theirs in zip(*spans, strict=True):
        assert ours.start_token == theirs.start_token + 700
        assert ours.end_token == theirs.end_token + 700


def test_deadline_ends_answer_with_problem() -> None:
    first, problem = lines_of(answer_of(TAGGER, 10_000), deadline=-math.inf)
    assert first["tokens_used"] == 10_000
    assert problem["status"] == 504
    assert "deadline" in problem["detail"]


def test_spans_are_found_without_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All labels of a long document would take much memory, only to be dropped."""
    answer = answer_of(TAGGER, 20_000)
    complete = answer.complete().heads
    assert complete is not None
    expected = complete["head"].spans

    def fail(*_: object) -> None:
        raise AssertionError("expected no answers for tokens")

    monkeypatch.setattr(TokenLabels, "answer", fail)
    spans = tuple(answer.tokens.all_spans("head"))
    assert spans == expected
    assert len(spans) > 2000


def test_answer_is_complete() -> None:
    answer = answer_of(TAGGER, 50)
    expected = answer.complete().model_dump_json(exclude_none=True).encode()
    assert asyncio.run(complete_json(answer, LoopTurns())) == expected


def test_deadline_does_not_wait_for_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on while a thread makes the answer."""
    go_on, threads = threading.Event(), list[int]()

    def slow(answer: DocumentAnswer) -> bytes:
        threads.append(threading.get_ident())
        assert go_on.wait(60)
        return b""

    async def answered() -> None:
        try:
            with pytest.raises(DeadlineError):
                await run_until_disconnect(
                    complete_json(answer_of(TAGGER, 50), LoopTurns()), stay, time.monotonic() + 0.1
                )
        finally:
            go_on.set()

    monkeypatch.setattr("aftserve.api.document_answers._json", slow)
    asyncio.run(answered())
    assert threads != [threading.get_ident()]


LATE = "The request was not answered by its deadline"


class Documents:
    """Documents that are done once a test says so; their answer is a refusal."""

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

    async def send(message: Any) -> None:
        messages.append(message)

    async def line(text: str) -> bytes:
        if text == "b":
            await stay()
        return json.dumps({"status": 422, "detail": f"Seen {text}."}).encode() + b"\n"

    async def scenario() -> None:
        tasks = [asyncio.create_task(line(text)) for text in "abc"]
        await asyncio.sleep(0)
        assert [task.done() for task in tasks] == [True, False, True]
        await LinesResponse(tasks, LINES, deadline=-math.inf)({"type": "http"}, stay, send)
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
