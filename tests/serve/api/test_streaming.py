"""Plain text and newline-delimited JSON, processed while they arrive."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from clients import eventually, head, http, metric, raw_connection, response
from servers import serving

LONGEST = 100_000
TEXTS = ["a", "An invoice.", "Zwei Verträge: 契約 ✉", "long " * 900]
LINES = "application/x-ndjson"


@pytest.fixture(scope="module")
def address(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("streams") / "log"
    with serving(bundle_folder, log, "--max-tokens", str(LONGEST), measured=True) as (address, _):
        yield address
    assert "Traceback" not in log.read_text("utf-8")


def post(address: str, content: bytes, kind: str) -> httpx.Response:
    return http.post(f"{address}/infer", content=content, headers={"Content-Type": kind})


def scores(address: str, text: str) -> dict[str, float]:
    answer = http.post(f"{address}/infer", json={"text": text}).json()
    return dict(answer["scores"])


@pytest.mark.parametrize("kind", ["text/plain", "text/plain; charset=utf-8", "Text/Plain"])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_plain_text_is_one_document(address: str, text: str, kind: str) -> None:
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


@pytest.mark.parametrize("content", [b"\xff", b"a\xe5\xa5", b"a" * 70_000 + b"\xff"])
def test_invalid_utf8_is_refused(address: str, content: bytes) -> None:
    answer = post(address, content, "text/plain")
    assert answer.status_code == 422
    assert "not UTF-8" in answer.json()["detail"]


@pytest.mark.parametrize("charset", ["utf-16le", "iso-8859-1", '"UTF-16"', "none-such"])
def test_other_charset_is_refused(charset: str, address: str) -> None:
    answer = post(address, b"h\0i\0", f"text/plain; charset={charset}")
    assert answer.status_code == 415
    assert charset.strip('"').lower() in answer.json()["detail"]


@pytest.mark.parametrize("parameter", ["charset*" + "1" * 5000 + "=utf-8", '"a' + ";" * 60_000])
def test_overlong_content_type_is_refused(parameter: str, address: str) -> None:
    answer = post(address, b"a", f"text/plain; {parameter}")
    assert answer.status_code == 415
    assert "too long" in answer.json()["detail"]


def test_byte_order_mark_is_dropped(address: str) -> None:
    answer = post(address, b"\xef\xbb\xbfAn invoice.", "text/plain")
    assert answer.json()["tokens_total"] == len("An invoice.")
    assert answer.json()["scores"] == pytest.approx(scores(address, "An invoice."), abs=1e-6)


def test_empty_text_is_refused(address: str) -> None:
    answer = post(address, b"", "text/plain")
    assert answer.status_code == 422
    assert "no tokens" in answer.json()["detail"]


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


def test_lines_in_other_charset_are_refused(address: str) -> None:
    answer = post(address, b"a", f"{LINES}; charset=utf-16le")
    assert answer.status_code == 415
    assert "must be utf-8, got utf-16le" in answer.json()["detail"]


def test_answers_keep_order_of_lines(address: str) -> None:
    sent = [{"text": text} for text in TEXTS] + [{"input_ids": [1, 2, 3]}]
    content = b"\n\n".join(json.dumps(line).encode() for line in sent) + b"\r\n"
    answer = post(address, content, LINES)
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == LINES
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [f["tokens_total"] for f in found] == [*(len(t.encode()) for t in TEXTS), 3]
    for text, line in zip(TEXTS, found, strict=False):
        assert line["scores"] == pytest.approx(scores(address, text), abs=1e-5)


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


@pytest.mark.parametrize(("content", "status"), [(b"", 422), (b"\n \n", 422), (b"{}\n" * 257, 413)])
def test_empty_or_excess_lines_are_refused(address: str, content: bytes, status: int) -> None:
    assert post(address, content, LINES).status_code == status


def test_disconnect_drops_queued_lines(address: str) -> None:
    line = json.dumps({"input_ids": [7] * LONGEST}).encode() + b"\n"
    with raw_connection(address) as connection:
        connection.sendall(head(len(line) * 30).replace(b"application/json", LINES.encode()))
        connection.sendall(line * 29)
        eventually(lambda: metric(address, "aftserve_waiting_documents") > 0, "lines wait")
    eventually(lambda: metric(address, "aftserve_waiting_documents") == 0, "lines are dropped")
    eventually(lambda: metric(address, "aftserve_running_documents") == 0, "the run is stopped")
