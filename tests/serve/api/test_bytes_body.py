"""Raw bytes as the body of a request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from clients import http
from servers import serving

LONGEST = 50_000
BINARY = bytes(range(256)) * 3 + b"\xff\xfe\xed\xa0\x80"
BYTES = "application/octet-stream"


@pytest.fixture(scope="module")
def address(heads_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("bytes") / "log"
    with serving(heads_bundle, log, "--max-tokens", str(LONGEST)) as (address, _):
        yield address
    assert "Traceback" not in log.read_text("utf-8")


def post(address: str, content: bytes, kind: str = BYTES, query: str = "") -> httpx.Response:
    return http.post(f"{address}/infer{query}", content=content, headers={"Content-Type": kind})


def scores(answer: dict[str, Any]) -> Any:
    return answer["heads"]["topic"]["scores"]


@pytest.mark.parametrize("content", [BINARY, b"\0", "契約".encode()], ids=["all", "zero", "text"])
def test_bytes_are_token_ids(address: str, content: bytes) -> None:
    answer = post(address, content)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_total"] == len(content)
    ids = np.frombuffer(content, np.uint8).tolist()
    (by_ids,) = http.post(f"{address}/infer", json={"input_ids": [ids]}).json()["results"]
    assert scores(answer.json()) == pytest.approx(scores(by_ids), abs=1e-6)


def test_text_and_bytes_have_one_answer(address: str) -> None:
    text = "Zwei Verträge: 契約 ✉"
    first, second = (post(address, text.encode(), kind).json() for kind in (BYTES, "text/plain"))
    assert scores(first) == pytest.approx(scores(second), abs=1e-6)


def test_evidence_of_bytes_has_tokens(address: str) -> None:
    evidence = post(address, BINARY, query="?evidence=2").json()["evidence"]
    assert all(span["start_token"] < span["end_token"] for span in evidence["spans"])
    assert all("text" not in span for span in evidence["spans"])


@pytest.mark.parametrize(("content", "status"), [(b"", 422), (b"a" * (LONGEST + 1), 413)])
def test_length_of_bytes_is_checked(address: str, content: bytes, status: int) -> None:
    assert post(address, content).status_code == status


def test_openapi_lists_bytes(address: str, server: str) -> None:
    """Only a server of a model of bytes lists them; for others they must be a .npy file."""

    def kinds(of: str) -> set[str]:
        route = http.get(f"{of}/openapi.json").json()["paths"]["/infer"]["post"]
        return set(route["requestBody"]["content"])

    assert kinds(address) - kinds(server) == {BYTES}
    refused = post(server, BINARY)
    assert refused.status_code == 415
    assert ".npy" in refused.json()["detail"]


def test_other_type_error_names_bytes(address: str) -> None:
    assert BYTES in post(address, b"a", "image/png").json()["detail"]
