"""The Python client against a real server."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import httpx
import numpy as np
import pytest
from clients import http
from commands import run_python
from servers import Stub, listening

from aftserve.client import (
    Client,
    InvalidRequestError,
    NotAllowedError,
    Result,
    ServerError,
    TooLongError,
)

DOCUMENTS = ["An invoice.", "Zwei Verträge: 契約 ✉", "long " * 300]


@pytest.fixture
def asking(server: str) -> Iterator[Client]:
    with Client(server) as client:
        yield client


def test_ids_may_be_arrays_or_lists(asking: Client) -> None:
    assert asking.infer(DOCUMENTS[1]).timings.inference_seconds > 0
    ids = asking.infer([np.array([1, 2, 3]), [4]])  # type: ignore[list-item]
    assert [result.tokens_total for result in ids] == [3, 1]


def test_answers_keep_order_around_failure(asking: Client) -> None:
    def documents() -> Iterator[str | list[int]]:
        for number in range(300):
            yield [10**9] if number == 150 else "x" * (number + 1)

    answers = list(asking.infer_each(documents(), batch_size=70))
    assert len(answers) == 300
    failed = answers.pop(150)
    assert isinstance(failed, InvalidRequestError)
    assert failed.status == 422
    assert "outside the vocabulary" in failed.detail
    lengths = [answer.tokens_total for answer in answers if isinstance(answer, Result)]
    assert lengths == [n for n in range(1, 301) if n != 151]


def test_oversized_request_is_split(asking: Client) -> None:
    documents = ["x" * (number + 1) for number in range(299)]  # too many for one request
    documents[20] = "x" * (17 << 20)  # too large for any request
    answers = list(asking.infer_each(documents, batch_size=len(documents)))
    too_long = answers.pop(20)
    assert isinstance(too_long, TooLongError)
    assert "bytes" in too_long.detail
    lengths = [answer.tokens_total for answer in answers if isinstance(answer, Result)]
    assert lengths == [n for n in range(1, 300) if n != 21]


def test_split_request_keeps_first_answers(server: str) -> None:
    class Handler(Stub):
        """Pass single documents to the real server, except the last; refuse several at once."""

        def post(self, body: bytes) -> None:
            status, content = 413, b'{"detail": "too large"}'
            if body == b'{"text": "last"}':
                status, content = 401, b'{"detail": "not allowed"}'
            elif b"\n" not in body:
                kind = {"Content-Type": self.headers["Content-Type"]}
                answer = http.post(f"{server}/infer", content=body, headers=kind)
                status, content = answer.status_code, answer.content
            self.answer(status, content)

    with listening(Handler) as address, Client(address) as client:
        answers = client.infer_each(["a", "bb", "last"])
        first = [next(answers), next(answers)]
        assert [one.tokens_total for one in first if isinstance(one, Result)] == [1, 2]
        with pytest.raises(NotAllowedError):
            next(answers)


def test_evidence_is_that_of_json(asking: Client, client: httpx.Client) -> None:
    expected = client.post("/infer?evidence=2", json={"text": DOCUMENTS[2]}).json()["evidence"]
    one, several = asking.infer(DOCUMENTS[2], evidence=2), asking.infer(DOCUMENTS[2:], evidence=2)
    assert one.evidence is not None
    found = asdict(one.evidence)
    found["spans"] = [{n: v for n, v in span.items() if v is not None} for span in found["spans"]]
    assert found == expected | {"name": None, "head": None}  # it is for the label
    assert several[0].evidence == one.evidence
    assert asking.infer(DOCUMENTS[2]).evidence is None
    short = asking.infer(DOCUMENTS[2], evidence=2, evidence_tokens=1).evidence
    assert short is not None
    assert [span.end_token - span.start_token for span in short.spans] == [1] * len(short.spans)


def test_evidence_survives_line_break_characters(asking: Client) -> None:
    text = "a\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029b" * 20
    (each,) = asking.infer_each([text], evidence=100)
    assert isinstance(each, Result)
    assert each.evidence == asking.infer(text, evidence=100).evidence


def test_infer_each_refuses_single_text(asking: Client) -> None:
    with pytest.raises(TypeError):
        list(asking.infer_each("a text"))


@pytest.mark.parametrize("count", [0, -1])
def test_batch_size_must_be_positive(count: int, asking: Client) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        list(asking.infer_each(["a text"], batch_size=count))


@pytest.mark.parametrize(
    ("documents", "error"),
    [([], InvalidRequestError), ([[]], InvalidRequestError), ("x" * 6001, TooLongError)],
)
def test_invalid_documents_raise_typed_errors(
    documents: "str | list[str]", error: type[ServerError], asking: Client
) -> None:
    with pytest.raises(error) as caught:
        asking.infer(documents)
    assert caught.value.status in (413, 422)
    assert caught.value.detail


def test_api_key_is_sent() -> None:
    class Handler(Stub):
        def post(self, body: bytes) -> None:
            known = self.headers["X-API-Key"] == "key-of-one"
            self.answer(404 if known else 401, b'{"detail": "no"}')

    with listening(Handler) as address:
        for key, error in (("key-of-one", InvalidRequestError), (None, NotAllowedError)):
            with Client(address, api_key=key) as client, pytest.raises(error):
                client.infer("a")


def test_client_imports_no_server_packages(tmp_path: Path) -> None:
    outcome = run_python(
        "-c", "import sys, aftserve.client; print(sorted(sys.modules))", cwd=tmp_path
    )
    assert outcome.code == 0, outcome.err
    for package in ("torch", "fastapi", "uvicorn", "onnxruntime", "numpy", "aftexport"):
        assert f"'{package}'" not in outcome.out


def test_invalid_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="retries must be at least 0, got -1"):
        Client("http://127.0.0.1:1", retries=-1)
    with Client("http://127.0.0.1:1", deadline=float("inf")) as client:
        with pytest.raises(ValueError, match=r"deadline must be .* got inf"):
            client.infer("a")
        with pytest.raises(ValueError, match=r"deadline must be .* got nan"):
            client.infer("a", deadline=float("nan"))


@pytest.mark.parametrize(
    ("url", "key"), [("http://[::1", "Q7"), ("http://127.0.0.1:1", "schlüssel")]
)
def test_invalid_url_or_key_is_refused(url: str, key: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        Client(url, api_key=key)
    assert key not in str(refused.value)
