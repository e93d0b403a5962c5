"""Plain text, raw bytes and newline-delimited JSON, processed while they arrive."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from clients import eventually, head, http, metric, raw_connection, response
from servers import Serve

LONGEST = 100_000
TEXTS = ["a", "An invoice.", "Zwei Verträge: 契約 ✉", "long " * 900]
LINES = "application/x-ndjson"


@pytest.fixture(scope="module")
def address(bundle_folder: Path, serve: Serve) -> str:
    return serve(bundle_folder, "--max-tokens", str(LONGEST), measured=True)


def post(address: str, content: bytes, kind: str) -> httpx.Response:
    return http.post(f"{address}/infer", content=content, headers={"Content-Type": kind})


def scores(address: str, text: str) -> dict[str, float]:
    answer = http.post(f"{address}/infer", json={"text": text}).json()
    return dict(answer["scores"])


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; charset=utf-8", "Text/Plain"])
def test_plain_text_is_one_document(address: str, kind: str) -> None:
    text = TEXTS[2]
    answer = post(address, text.encode(), kind)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_total"] == len(text.encode())
    assert answer.json()["scores"] == pytest.approx(scores(address, text), abs=1e-6)


def test_chunks_may_split_characters(address: str) -> None:
    encoded = "契約".encode() * 20_000
    parts = [encoded[i : i + 7001] for i in range(0, len(encoded), 7001)]
    answer = http.post(
        f"{address}/infer", content=iter(parts), headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 413  # 120,000 tokens
    short = http.post(
        f"{address}/infer", content=iter(parts[:9]), headers={"Content-Type": "text/plain"}
    )
    assert short.status_code == 200, short.text
    assert short.json()["tokens_total"] == 9 * 7001


BAD: list[tuple[bytes, str, int, str]] = [
    *((content, "text/plain", 422, "not UTF-8")
      for content in (b"\xff", b"a\xe5\xa5", b"a" * 70_000 + b"\xff")),
    (b"%PDF-1.7\n%\xe2\xe3", "text/plain", 422, "by pdftotext"),
    (b"PK\x03\x04\x14\x00\xff", "text/plain", 422, "such as a .docx file, as plain text"),
    ("a".encode("utf-16"), "text/plain", 422, "iconv -f utf-16 -t utf-8"),
    ("ë".encode("latin-1"), "text/plain", 422, "does so for Latin-1"),
    *((b"h\0i\0", f"text/plain; charset={charset}", 415, charset.strip('"').lower())
      for charset in ("utf-16le", "iso-8859-1", '"UTF-16"', "none-such")),
    *((b"a", f"text/plain; {parameter}", 415, "too long")
      for parameter in ("charset*" + "1" * 5000 + "=utf-8", '"a' + ";" * 60_000)),
    (b"a", f"{LINES}; charset=utf-16le", 415, "must be utf-8, got utf-16le"),
    (b"", "text/plain", 422, "no tokens"),
    (b"", LINES, 422, "no lines"),
    (b"\n \n", LINES, 422, "no lines"),
    (b"{}\n" * 257, LINES, 413, "at most 256 lines"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "kind", "status", "said"), BAD, ids=range(len(BAD)))
def test_bad_body_is_refused(
    content: bytes, kind: str, status: int, said: str, address: str
) -> None:
    answer = post(address, content, kind)
    assert answer.status_code == status
    assert said in answer.json()["detail"]


def test_byte_order_mark_is_dropped(address: str) -> None:
    answer = post(address, b"\xef\xbb\xbfAn invoice.", "text/plain")
    assert answer.json()["tokens_total"] == len("An invoice.")
    assert answer.json()["scores"] == pytest.approx(scores(address, "An invoice."), abs=1e-6)


@pytest.mark.parametrize("kind", ["text/plain", LINES])
def test_unknown_encoding_is_refused(address: str, kind: str) -> None:
    headers = {"Content-Type": kind, "Content-Encoding": "br"}
    assert http.post(f"{address}/infer", content=b"a", headers=headers).status_code == 415


def test_long_text_refused_before_its_end(address: str) -> None:
    with raw_connection(address) as connection:
        start = head(500 << 20).replace(b"application/json", b"text/plain")
        # Send chunks without a length: the length would exceed the byte limit.
        start = start.replace(b"Content-Length: 524288000", b"Transfer-Encoding: chunked")
        connection.sendall(start)
        for _ in range(4):
            connection.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
        status, body = response(connection)
    assert status == 413
    assert re.search(rb"at most 100000 tokens, got \d+ or more", body)


@pytest.mark.parametrize("form", ["json", "lines", "open inference"])
def test_whole_text_refused_by_its_prefix(form: str, address: str) -> None:
    """The tokens of the beginning exceed the limit, so the server does not encode the rest."""
    text = "\u5951 long" * 1_000_000
    match form:
        case "json":
            answer = http.post(f"{address}/infer", json={"text": text})
        case "lines":
            answer = post(address, json.dumps({"text": text}).encode(), LINES)
        case _:
            sent = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}
            answer = http.post(f"{address}/v2/models/model/infer", json={"inputs": [sent]})
    found = re.search(r"document 0: A document .* tokens, got (\d+) or more", answer.text)
    assert found, answer.text[:500]
    assert LONGEST < int(found[1]) < 2 * LONGEST


@pytest.mark.parametrize("unit", ["a", "契"])
def test_longest_allowed_text_is_accepted(unit: str, address: str) -> None:
    size = len(unit.encode())
    text = unit * (LONGEST // size)
    assert http.post(f"{address}/infer", json={"text": text}).status_code == 200
    answer = http.post(f"{address}/infer", json={"text": text + unit})
    assert answer.status_code == 413
    assert f"tokens, got {(LONGEST // size + 1) * size}." in answer.json()["detail"]


def test_huge_stream_leaves_memory_unchanged(address: str) -> None:
    before = metric(address, "process_resident_memory_bytes")
    assert before > 0

    def parts() -> Iterator[bytes]:
        for _ in range(500):
            yield b"a" * (1 << 20)

    headers = {"Content-Type": "text/plain"}
    answer = http.post(f"{address}/infer", content=parts(), headers=headers, timeout=120)
    assert answer.status_code == 413
    assert " or more." in answer.json()["detail"]
    assert metric(address, "process_resident_memory_bytes") < before + (32 << 20)


@pytest.mark.parametrize(
    "kind",
    ["application/jsonl", "application/ndjson", "Application/X-JSONLines; charset=utf-8"],
)
def test_lines_have_several_content_types(kind: str, address: str) -> None:
    answer = post(address, b'{"text": "a"}\n{"input_ids": [1, 2]}', kind)
    assert answer.status_code == 200, answer.text
    assert [json.loads(line)["tokens_total"] for line in answer.text.splitlines()] == [1, 2]
    assert answer.headers["Content-Type"] == kind.partition(";")[0].lower()


@pytest.mark.parametrize("kind", ["", "text/html", "application/json-seq", "application/jsonx"])
def test_refused_type_gets_accepted_types(kind: str, address: str) -> None:
    answer = post(address, b'{"text": "a"}', kind)
    assert answer.status_code == 415
    detail = answer.json()["detail"]
    for accepted in ("application/json,", "text/plain,", LINES, "application/jsonl"):
        assert accepted in detail
    assert f"got {kind or 'none'}." in detail
    parity = http.post(f"{address}/parity", content=b"a", headers={"Content-Type": kind})
    assert f"must be application/json, got {kind or 'none'}." in parity.json()["detail"]


def test_answers_keep_order_of_lines(address: str) -> None:
    sent = [{"text": text} for text in TEXTS] + [{"input_ids": [1, 2, 3]}]
    content = b"\n\n".join(json.dumps(line).encode() for line in sent) + b"\r\n"
    answer = post(address, content, LINES)
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == LINES
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [f["tokens_total"] for f in found] == [*(len(t.encode()) for t in TEXTS), 3]


def test_bad_line_leaves_others_answered(address: str) -> None:
    lines = ['{"text": "a"}', "no JSON", '{"text": ""}', '{"texts": ["a"]}', "[]",
             '{"input_ids": [999999]}', '{"text": "b"}']  # fmt: skip
    answer = post(address, "\n".join(lines).encode(), LINES)
    assert answer.status_code == 200
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [line.get("status", 200) for line in found] == [200, 422, 422, 422, 422, 422, 200]
    assert "outside the vocabulary" in found[5]["detail"]


def test_lines_run_before_last_arrives(address: str) -> None:
    done = metric(address, "aftserve_run_documents_count")
    with raw_connection(address) as connection:
        connection.sendall(head(None).replace(b"application/json", LINES.encode()))
        connection.sendall(b'10\r\n{"text": "abc"}\n\r\n')
        eventually(
            lambda: metric(address, "aftserve_run_documents_count") == done + 1, "the line has run"
        )
        connection.sendall(b"0\r\n\r\n")
        status, _ = response(connection)
    assert status == 200


def test_disconnect_drops_queued_lines(address: str) -> None:
    line = json.dumps({"input_ids": [7] * LONGEST}).encode() + b"\n"
    with raw_connection(address) as connection:
        connection.sendall(head(len(line) * 30).replace(b"application/json", LINES.encode()))
        connection.sendall(line * 29)
        eventually(lambda: metric(address, "aftserve_waiting_documents") > 0, "lines wait")
    eventually(lambda: metric(address, "aftserve_waiting_documents") == 0, "lines are dropped")
    eventually(lambda: metric(address, "aftserve_running_documents") == 0, "the run is stopped")


MAX_BYTES = 2000
"""Maximum tokens of the session's server of many heads."""
BINARY = bytes(range(256)) * 3 + b"\xff\xfe\xed\xa0\x80"
BYTES = "application/octet-stream"


@pytest.mark.parametrize("content", [BINARY, b"\0", "契約".encode()], ids=["all", "zero", "text"])
def test_bytes_are_token_ids(heads_server: str, content: bytes) -> None:
    answer = post(heads_server, content, BYTES)
    assert answer.status_code == 200, answer.text
    assert answer.json()["tokens_total"] == len(content)
    ids = np.frombuffer(content, np.uint8).tolist()
    (by_ids,) = http.post(f"{heads_server}/infer", json={"input_ids": [ids]}).json()["results"]
    found, expected = (one["heads"]["topic"]["scores"] for one in (answer.json(), by_ids))
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("content", "status"), [(b"", 422), (b"a" * (MAX_BYTES + 1), 413)])
def test_length_of_bytes_is_checked(heads_server: str, content: bytes, status: int) -> None:
    assert post(heads_server, content, BYTES).status_code == status


def test_openapi_lists_bytes(heads_server: str, server: str) -> None:
    """Only a server of a model of bytes lists them; for others they must be a .npy file."""

    def kinds(of: str) -> set[str]:
        route = http.get(f"{of}/openapi.json").json()["paths"]["/infer"]["post"]
        return set(route["requestBody"]["content"])

    assert kinds(heads_server) - kinds(server) == {BYTES}
    refused = post(server, BINARY, BYTES)
    assert refused.status_code == 415
    assert ".npy" in refused.json()["detail"]


def test_other_type_error_names_bytes(heads_server: str) -> None:
    assert BYTES in post(heads_server, b"a", "image/png").json()["detail"]
