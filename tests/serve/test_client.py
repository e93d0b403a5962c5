"""The Python client against a real server, and against one that is busy, away or slow."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from email.utils import formatdate
from pathlib import Path

import httpx
import numpy as np
import pytest
from commands import run_python
from servers import Stub, listening, serving

from aftserve.client import (
    BusyError,
    Client,
    DeadlineError,
    InvalidRequestError,
    NotAllowedError,
    Result,
    ServerError,
    TooLongError,
    UnavailableError,
)
from aftserve.client import client as client_module
from aftserve.keys import make_key

DOCUMENTS = ["An invoice.", "Zwei Verträge: 契約 ✉", "long " * 300]


@pytest.fixture
def asking(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client


def test_a_text_texts_and_token_ids(asking: Client, client: httpx.Client) -> None:
    expected = client.post("/infer", json={"text": DOCUMENTS[1]}).json()
    one = asking.infer(DOCUMENTS[1])
    assert one.label == expected["label"]
    assert one.scores == expected["scores"]
    assert one.bundle == expected["bundle"]
    assert one.timings.inference_seconds > 0
    several = asking.infer(DOCUMENTS)
    assert [result.tokens_total for result in several] == [len(d.encode()) for d in DOCUMENTS]
    assert several[1].scores == pytest.approx(one.scores, abs=1e-5)
    ids = asking.infer([np.array([1, 2, 3]), [4]])  # type: ignore[list-item]
    assert [result.tokens_total for result in ids] == [3, 1]


def test_any_number_of_documents_in_order_and_each_fails_alone(asking: Client) -> None:
    def documents() -> Iterator[str | list[int]]:
        for number in range(300):
            yield [10**9] if number == 150 else "x" * (number + 1)

    answers = list(asking.infer_each(documents(), at_once=70))
    assert len(answers) == 300
    failed = answers.pop(150)
    assert isinstance(failed, InvalidRequestError)
    assert failed.status == 422
    assert "outside the vocabulary" in failed.detail
    lengths = [answer.tokens_total for answer in answers if isinstance(answer, Result)]
    assert lengths == [n for n in range(1, 301) if n != 151]


def test_a_request_that_is_too_large_is_asked_in_two(asking: Client) -> None:
    documents = ["x" * (number + 1) for number in range(299)]  # in one request, more than it takes
    documents[20] = "x" * (17 << 20)  # more than any request may have
    answers = list(asking.infer_each(documents, at_once=len(documents)))
    too_long = answers.pop(20)
    assert isinstance(too_long, TooLongError)
    assert "bytes" in too_long.detail
    lengths = [answer.tokens_total for answer in answers if isinstance(answer, Result)]
    assert lengths == [n for n in range(1, 300) if n != 21]


def test_of_a_request_asked_in_two_the_first_answers_are_not_lost_with_the_second(
    server: str,
) -> None:
    class Handler(Stub):
        """The real server's answers, but to one document at a time, and none to the last."""

        def post(self, body: bytes) -> None:
            status, content = 413, b'{"detail": "too large"}'
            if body == b'{"text": "last"}':
                status, content = 401, b'{"detail": "no more"}'
            elif b"\n" not in body:
                kind = {"Content-Type": self.headers["Content-Type"]}
                answer = httpx.post(f"{server}/infer", content=body, headers=kind)
                status, content = answer.status_code, answer.content
            self.answer(status, content)

    with listening(Handler) as address, Client(address) as client:
        answers = client.infer_each(["a", "bb", "last"])
        first = [next(answers), next(answers)]
        assert [one.tokens_total for one in first if isinstance(one, Result)] == [1, 2]
        with pytest.raises(NotAllowedError):
            next(answers)


def test_evidence_where_it_is_asked_for(asking: Client, client: httpx.Client) -> None:
    expected = client.post("/infer?evidence=2", json={"text": DOCUMENTS[2]}).json()["evidence"]
    assert asking.infer(DOCUMENTS[2]).evidence is None
    one, several = asking.infer(DOCUMENTS[2], evidence=2), asking.infer(DOCUMENTS[2:], evidence=2)
    assert one.evidence is not None
    assert asdict(one.evidence) == expected
    assert several[0].evidence == one.evidence
    (each,) = asking.infer_each(DOCUMENTS[2:], evidence=2)
    assert isinstance(each, Result)
    assert each.evidence == one.evidence
    (ids,) = asking.infer([[1, 2, 3, 200]], evidence=1)
    assert ids.evidence is not None
    assert ids.evidence.spans[0].text is None


def test_evidence_with_every_character_that_ends_a_line(asking: Client) -> None:
    text = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b" * 20
    (each,) = asking.infer_each([text], evidence=100)
    assert isinstance(each, Result)
    assert each.evidence == asking.infer(text, evidence=100).evidence


def test_one_text_is_not_taken_for_many(asking: Client) -> None:
    with pytest.raises(TypeError):
        list(asking.infer_each("a text"))


@pytest.mark.parametrize("count", [0, -1])
def test_requests_of_no_documents_would_leave_all_out(count: int, asking: Client) -> None:
    with pytest.raises(ValueError, match="at_once"):
        list(asking.infer_each(["a text"], at_once=count))


@pytest.mark.parametrize(
    ("documents", "error"),
    [([], InvalidRequestError), ([[]], InvalidRequestError), ("x" * 6001, TooLongError)],
)
def test_what_cannot_be_answered_says_why(
    documents: "str | list[str]", error: type[ServerError], asking: Client
) -> None:
    with pytest.raises(error) as caught:
        asking.infer(documents)
    assert caught.value.status in (413, 422)
    assert caught.value.detail


def test_a_key_is_sent(bundle_folder: Path, tmp_path: Path) -> None:
    key, section = make_key("one", None)
    (tmp_path / "keys.toml").write_text(section)
    options = ("--api-keys", str(tmp_path / "keys.toml"))
    with serving(bundle_folder, tmp_path / "log", *options) as (address, _):
        with Client(address, api_key=key) as client:
            assert client.infer("a").label
        with Client(address) as client, pytest.raises(NotAllowedError):
            client.infer("a")


def test_nobody_there_is_said_after_the_tries(waits: list[float]) -> None:
    with Client("http://127.0.0.1:1", retries=3) as client, pytest.raises(UnavailableError):
        client.infer("a")
    assert len(waits) == 3
    assert all(0.5 * 2**n <= wait <= 0.55 * 2**n for n, wait in enumerate(waits))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would wait; it goes on at once."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


@contextmanager
def answering(
    *statuses: int,
    wait: str | None = "1",
    content: bytes = b'{"detail": "as it is"}',
    encoding: str = "identity",
) -> Iterator[tuple[str, list[float]]]:
    """A server that answers so, one after the other, and the deadlines it was given."""
    deadlines: list[float] = []
    left = iter(statuses)

    class Handler(Stub):
        def post(self, body: bytes) -> None:
            deadlines.append(float(self.headers["Deadline-Seconds"]))
            if (status := next(left, 0)) == 0:
                time.sleep(3)
            again = {} if wait is None else {"Retry-After": wait}
            self.answer(status or 200, content, {"Content-Encoding": encoding, **again})

    with listening(Handler) as address:
        yield address, deadlines


@pytest.mark.parametrize(("status", "error"), [(429, BusyError), (503, UnavailableError)])
def test_it_comes_again_when_the_server_says_and_not_for_ever(
    status: int, error: type[ServerError], waits: list[float]
) -> None:
    with answering(*[status] * 9, wait="2") as (address, deadlines), Client(address) as client:
        with pytest.raises(error) as caught:
            client.infer("a")
        assert caught.value.retry_after == 2
        assert len(deadlines) == 5
        assert len(waits) == 4
        assert all(2 <= wait <= 2.2 for wait in waits)


@pytest.mark.parametrize("lasting", [False, True])
def test_lines_that_found_the_server_busy_are_asked_again_alone(
    lasting: bool, server: str, waits: list[float]
) -> None:
    busy = b'{"detail": "later", "status": 429, "retry_after": 7}'
    asked: list[list[bytes]] = []

    class Handler(Stub):
        """The real server's answers, but of every second line one that it is busy."""

        def post(self, body: bytes) -> None:
            kind = {"Content-Type": self.headers["Content-Type"]}
            answers = httpx.post(f"{server}/infer", content=body, headers=kind).content.splitlines()
            if lasting or not asked:
                answers[1::2] = [busy] * len(answers[1::2])
            asked.append(body.split(b"\n"))
            content = b"\n".join(answers)
            self.answer(200, content)

    with listening(Handler) as address, Client(address, retries=1) as client:
        answers = list(client.infer_each(["x" * (n + 1) for n in range(8)] + [[10**9]]))
    assert [len(lines) for lines in asked] == [9, 4]
    assert asked[1] == asked[0][1::2]
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
def test_where_it_takes_too_long_or_nobody_knows_it_gives_up_at_once(
    wait: str | None, deadline: float
) -> None:
    with answering(503, 503, wait=wait) as (address, deadlines), Client(address) as client:
        with pytest.raises(UnavailableError, match="as it is"):
            client.infer("a", deadline=deadline)
        assert len(deadlines) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [*((status, UnavailableError) for status in (500, 502, 503, 504)), (429, BusyError)],
)
def test_it_comes_again_where_a_proxy_does_not_say_when(
    status: int, error: type[ServerError], waits: list[float]
) -> None:
    lost = answering(*[status] * 9, wait=None, content=b"Internal Server Error")
    with lost as (address, deadlines), Client(address) as client:
        with pytest.raises(error, match=f"{status}: Internal Server Error"):
            client.infer("a")
        assert len(deadlines) == 5
        assert all(1 <= wait <= 1.1 for wait in waits)


@pytest.mark.parametrize("content", [b"<html>maintenance</html>", b'{"detail": "maintenance"}'])
def test_it_comes_again_when_a_proxy_says(content: bytes, waits: list[float]) -> None:
    date = formatdate(time.time() + 30, usegmt=True)
    for wait, least, most in (("7", 7, 7.7), (date, 20, 33), (formatdate(0, usegmt=True), 0, 0)):
        waits.clear()
        away = answering(*[503] * 9, wait=wait, content=content)
        with (
            away as (address, _),
            Client(address, retries=1) as client,
            pytest.raises(UnavailableError),
        ):
            client.infer("a")
        assert len(waits) == 1
        assert least <= waits[0] <= most


def test_a_redirect_is_not_followed_but_said() -> None:
    class Handler(Stub):
        def post(self, body: bytes) -> None:
            self.answer(308, headers={"Location": "https://models.example/infer"})

    with (
        listening(Handler) as address,
        Client(address, api_key="secret") as client,
        pytest.raises(InvalidRequestError, match=r"https://models\.example/infer"),
    ):
        client.infer("a")


def test_what_will_not_change_is_not_asked_again() -> None:
    for status, error in ((422, InvalidRequestError), (500, ServerError), (504, DeadlineError)):
        with answering(status, 200) as (address, deadlines), Client(address) as client:
            with pytest.raises(error):
                client.infer("a")
            assert len(deadlines) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>Log in.</html>", b"[]", b'{"label": "a"}', b'{"results": [1]}', b"\xff"],
)
def test_what_no_server_of_ours_answers(content: bytes) -> None:
    with answering(200, 200, 200, content=content) as (address, _), Client(address) as client:
        with pytest.raises(ServerError, match="no aftserve"):
            client.infer("a")
        with pytest.raises(ServerError, match="no aftserve"):
            client.infer(["a"])
        with pytest.raises(ServerError, match="no aftserve"):
            list(client.infer_each(["a"]))


def test_each_document_has_its_own_answer_or_none_has() -> None:
    line = b'{"detail": "as it is", "status": 422}\n'
    with answering(200, content=line) as (address, deadlines), Client(address) as client:
        with pytest.raises(ServerError, match="1 answers to 2 documents"):
            list(client.infer_each(["a", "b"]))
        assert len(deadlines) == 1


def test_a_body_that_cannot_be_decoded_is_a_server_out_of_reach() -> None:
    broken = answering(200, content=b"not compressed", encoding="gzip")
    with broken as (address, deadlines), Client(address, retries=0) as client:
        with pytest.raises(UnavailableError):
            client.infer("a")
        assert len(deadlines) == 1


def test_what_cannot_be_sent_is_not_tried_again(waits: list[float]) -> None:
    with Client("x:80") as client, pytest.raises(InvalidRequestError, match="no address"):
        client.infer("a")
    with answering() as (address, _), Client(address, api_key="secret\n") as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.infer("a")
        assert "secret" not in str(caught.value)
    with Client("http://127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match="bytes"):
        client.infer([b"a text"])  # type: ignore[list-item]
    assert not waits


def test_the_deadline_is_told_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_GRACE", 0.1)
    with answering(0) as (address, deadlines), Client(address, deadline=0.5) as client:
        with pytest.raises(DeadlineError):
            client.infer("a")
        assert 0 < deadlines[0] <= 0.5
    with Client("http://127.0.0.1:1") as client, pytest.raises(DeadlineError):
        client.infer("a", deadline=0)


def test_an_answer_that_trickles_ends_at_the_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
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
            client.infer("a", deadline=0.5)
        assert left.wait(30)


def test_it_needs_nothing_of_the_servers(tmp_path: Path) -> None:
    outcome = run_python(
        "-c", "import sys, aftserve.client; print(sorted(sys.modules))", cwd=tmp_path
    )
    assert outcome.code == 0, outcome.err
    for package in ("torch", "fastapi", "uvicorn", "onnxruntime", "numpy", "aftexport"):
        assert f"'{package}'" not in outcome.out


def test_numbers_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="retries is -1"):
        Client("http://127.0.0.1:1", retries=-1)
    with Client("http://127.0.0.1:1", deadline=float("inf")) as client:
        with pytest.raises(ValueError, match="deadline is inf"):
            client.infer("a")
        with pytest.raises(ValueError, match="deadline is nan"):
            client.infer("a", deadline=float("nan"))


@pytest.mark.parametrize(
    ("url", "key"), [("http://[::1", "Q7"), ("http://127.0.0.1:1", "schlüssel")]
)
def test_what_no_request_can_have_is_refused_at_once(url: str, key: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Client(url, api_key=key)
    assert key not in str(refused.value)
