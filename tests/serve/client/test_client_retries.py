"""The Python client and servers that are busy, unreachable, slow, or not aftserve."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate

import pytest
from clients import http
from clocks import replace_time
from servers import Stub, listening

from aftserve.client import (
    BusyError,
    Client,
    DeadlineError,
    InvalidRequestError,
    Result,
    ServerError,
    UnavailableError,
)
from aftserve.client import client as client_module


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of the client's pauses in seconds; the client does not sleep."""
    seconds: list[float] = []
    replace_time(monkeypatch, client_module, sleep=seconds.append)
    return seconds


@contextmanager
def answering(
    *statuses: int,
    wait: str | None = "1",
    content: bytes = b'{"detail": "the reason"}',
    encoding: str = "identity",
) -> Iterator[tuple[str, list[float]]]:
    """Yield a server that sends these statuses in turn, and the list of received deadlines."""
    deadlines: list[float] = []
    left, over = iter(statuses), threading.Event()

    class Handler(Stub):
        def post(self, body: bytes) -> None:
            deadlines.append(float(self.headers["Deadline-Seconds"]))
            if (status := next(left, 0)) == 0:
                over.wait(60)
            again = {} if wait is None else {"Retry-After": wait}
            self.answer(status or 200, content, {"Content-Encoding": encoding, **again})

    with listening(Handler) as address:
        try:
            yield address, deadlines
        finally:
            over.set()


def test_unreachable_server_fails_after_retries(waits: list[float]) -> None:
    with Client("http://127.0.0.1:1", retries=3) as client, pytest.raises(UnavailableError):
        client.infer("a")
    assert len(waits) == 3
    assert all(0.5 * 2**n <= wait <= 0.55 * 2**n for n, wait in enumerate(waits))


@pytest.mark.parametrize(("status", "error"), [(429, BusyError), (503, UnavailableError)])
def test_retry_after_header_is_obeyed(
    status: int, error: type[ServerError], waits: list[float]
) -> None:
    with answering(*[status] * 9, wait="2") as (address, deadlines), Client(address) as client:
        with pytest.raises(error) as caught:
            client.infer("a")
        assert caught.value.retry_after == 2
        assert len(deadlines) == 5
        assert len(waits) == 4
        assert all(2 <= wait <= 2.2 for wait in waits)


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "always"])
def test_only_busy_lines_are_retried(lasting: bool, server: str, waits: list[float]) -> None:
    busy = b'{"detail": "later", "status": 429, "retry_after": 7}'
    requests: list[list[bytes]] = []

    class Handler(Stub):
        """Pass lines to the real server, and replace every second answer by status 429."""

        def post(self, body: bytes) -> None:
            kind = {"Content-Type": self.headers["Content-Type"]}
            answers = http.post(f"{server}/infer", content=body, headers=kind).content.splitlines()
            if lasting or not requests:
                answers[1::2] = [busy] * len(answers[1::2])
            requests.append(body.split(b"\n"))
            content = b"\n".join(answers)
            self.answer(200, content)

    with listening(Handler) as address, Client(address, retries=1) as client:
        answers = list(client.infer_each(["x" * (n + 1) for n in range(8)] + [[10**9]]))
    assert [len(lines) for lines in requests] == [9, 4]
    assert requests[1] == requests[0][1::2]
    assert all(7 <= wait <= 7.7 for wait in waits)
    assert len(waits) == 1
    failed = [answer for answer in answers if isinstance(answer, ServerError)]
    assert [error.status for error in failed] == ([429, 429, 422] if lasting else [422])
    lengths = [one.tokens_total if isinstance(one, Result) else None for one in answers]
    expected = [1, 2, 3, None, 5, 6, 7, None, None] if lasting else [*range(1, 9), None]
    assert lengths == expected


@pytest.mark.parametrize(
    ("wait", "deadline"), [("3600", 300.0), ("2", 1.0), (None, 300.0), ("soon", 300.0)]
)
def test_long_or_unknown_delay_prevents_retry(wait: str | None, deadline: float) -> None:
    with answering(503, 503, wait=wait) as (address, deadlines), Client(address) as client:
        with pytest.raises(UnavailableError, match="the reason"):
            client.infer("a", deadline=deadline)
        assert len(deadlines) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [*((status, UnavailableError) for status in (500, 502, 503, 504)), (429, BusyError)],
)
def test_proxy_error_without_delay_is_retried(
    status: int, error: type[ServerError], waits: list[float]
) -> None:
    proxy = answering(*[status] * 9, wait=None, content=b"Internal Server Error")
    with proxy as (address, deadlines), Client(address) as client:
        with pytest.raises(error, match=f"{status}: Internal Server Error"):
            client.infer("a")
        assert len(deadlines) == 5
        assert all(1 <= wait <= 1.1 for wait in waits)


@pytest.mark.parametrize("content", [b"<html>maintenance</html>", b'{"detail": "maintenance"}'])
def test_proxy_retry_after_is_obeyed(content: bytes, waits: list[float]) -> None:
    date = formatdate(time.time() + 30, usegmt=True)
    for wait, shortest, longest in (
        ("7", 7, 7.7),
        (date, 20, 33),
        (formatdate(0, usegmt=True), 0, 0),
    ):
        waits.clear()
        proxy = answering(*[503] * 9, wait=wait, content=content)
        with (
            proxy as (address, _),
            Client(address, retries=1) as client,
            pytest.raises(UnavailableError),
        ):
            client.infer("a")
        assert len(waits) == 1
        assert shortest <= waits[0] <= longest


def test_redirect_is_reported_not_followed() -> None:
    class Handler(Stub):
        def post(self, body: bytes) -> None:
            self.answer(308, headers={"Location": "https://models.example/infer"})

    with (
        listening(Handler) as address,
        Client(address, api_key="secret") as client,
        pytest.raises(InvalidRequestError, match=r"https://models\.example/infer"),
    ):
        client.infer("a")


def test_permanent_errors_are_not_retried() -> None:
    for status, error in ((422, InvalidRequestError), (500, ServerError), (504, DeadlineError)):
        with answering(status, 200) as (address, deadlines), Client(address) as client:
            with pytest.raises(error):
                client.infer("a")
            assert len(deadlines) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>Log in.</html>", b"[]", b'{"label": "a"}', b'{"results": [1]}', b"\xff"],
)
def test_foreign_responses_are_refused(content: bytes) -> None:
    with answering(200, 200, 200, content=content) as (address, _), Client(address) as client:
        with pytest.raises(ServerError, match="not one of aftserve"):
            client.infer("a")
        with pytest.raises(ServerError, match="not one of aftserve"):
            client.infer(["a"])
        with pytest.raises(ServerError, match="not one of aftserve"):
            list(client.infer_each(["a"]))


def test_missing_answers_fail_the_request() -> None:
    line = b'{"detail": "the reason", "status": 422}\n'
    with answering(200, content=line) as (address, deadlines), Client(address) as client:
        with pytest.raises(ServerError, match="1 answers to 2 documents"):
            list(client.infer_each(["a", "b"]))
        assert len(deadlines) == 1


def test_undecodable_body_raises_unavailable_error() -> None:
    broken = answering(200, content=b"not compressed", encoding="gzip")
    with broken as (address, deadlines), Client(address, retries=0) as client:
        with pytest.raises(UnavailableError):
            client.infer("a")
        assert len(deadlines) == 1


def test_invalid_requests_are_not_retried(waits: list[float]) -> None:
    with Client("x:80") as client, pytest.raises(InvalidRequestError, match="not a valid URL"):
        client.infer("a")
    with answering() as (address, _), Client(address, api_key="secret\n") as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.infer("a")
        assert "secret" not in str(caught.value)
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match="bytes"):
        client.infer([b"a text"])  # type: ignore[list-item]
    assert not waits


def test_deadline_is_sent_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_GRACE", 0.1)
    with answering(0) as (address, deadlines), Client(address, deadline=3) as client:
        with pytest.raises(DeadlineError):
            client.infer("a")
        assert 0 < deadlines[0] <= 3
    with Client("http://127.0.0.1:1") as client, pytest.raises(DeadlineError):
        client.infer("a", deadline=0)


def test_trickling_response_ends_at_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_GRACE", 0.1)
    left = threading.Event()

    class Handler(Stub):
        def post(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100000")
            self.end_headers()
            with suppress(ConnectionError):
                for _ in range(400):
                    self.wfile.write(b" ")
                    time.sleep(0.05)
            left.set()

    with listening(Handler) as address, Client(address) as client:
        with pytest.raises(DeadlineError):
            client.infer("a", deadline=3)
        assert left.wait(30)
