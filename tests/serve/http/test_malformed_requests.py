"""Requests that the parser refuses: oversized, malformed, or in an unknown coding."""

from contextlib import suppress

import pytest
from clients import (
    ANSWER,
    CHUNKED,
    GET,
    head,
    metric,
    raw_connection,
    read_to_end,
    refusal,
    response,
)

MIB = 1 << 20


ENDLESS_STARTS = {
    "header": b"GET /healthz HTTP/1.1\r\nX: ",
    "path": b"GET /" + b"a" * 1000,
    "chunk": head(None) + b"1;",
    "trailer": head(None) + b"1\r\n \r\n0\r\nX: ",
}
MALFORMED = {
    "TLS": b"\x16\x03\x01 TLS\r\n\r\n",
    "no host": GET.replace(b"Host: x\r\n", b""),
    "two hosts": GET.replace(b"Host: x\r\n", b"Host: x\r\nHost: y\r\n"),
    "CONNECT": b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "chunk size": head(None) + b"x\r\n",
} | {
    header.decode(): head(None).replace(CHUNKED, header) + b"{}"
    for header in (
        b"Content-Length: x",
        b"Content-Length: -1",
        b"Content-Length: 5\r\nContent-Length: 6",
        b"Content-Length: 2\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: gzip",
        b"Transfer-Encoding: chunked, gzip",
    )
}


@pytest.mark.parametrize("start", ENDLESS_STARTS.values(), ids=ENDLESS_STARTS)
def test_oversized_head_or_chunk_gets_431(start: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):  # the server may refuse it during the upload
            connection.sendall(start + b"a" * (MIB // 4))
        assert response(connection)[0] == 431


def test_too_many_headers_get_431(address: str) -> None:
    with raw_connection(address) as connection:
        with suppress(OSError):  # as above
            connection.sendall(GET[:-2] + b"X: a\r\n" * 50_000)
        assert response(connection)[0] == 431


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED)
def test_malformed_request_is_refused_and_counted(sent: bytes, address: str) -> None:
    series = {"path": "other", "status": "400"}
    before = metric(address, "aftserve_responses_total", **series)
    status, problem = refusal(address, sent)
    assert status == 400
    assert "not HTTP" in problem
    assert metric(address, "aftserve_responses_total", **series) == before + 1


@pytest.mark.parametrize(
    "coding",
    [
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
        b"Transfer-Encoding: GZIP ,\tchunked",
        b"Upgrade: h2c\r\nConnection: upgrade\r\nTransfer-Encoding: gzip, chunked",
    ],
)
def test_unknown_transfer_coding_gets_501(coding: bytes, address: str) -> None:
    status, problem = refusal(address, head(None).replace(CHUNKED, coding) + b"0\r\n\r\n")
    assert status == 501
    assert "without other codings" in problem


def test_url_without_path_is_refused(address: str) -> None:
    status, problem = refusal(address, GET.replace(b"/healthz", b"http://x"))
    assert status == 400
    assert "without a path" in problem


@pytest.mark.parametrize(
    "bad", [b"nonsense\r\n\r\n", head(None) + b"ZZ\r\n"], ids=["head", "chunk"]
)
def test_bad_request_keeps_earlier_answers(bad: bytes, address: str) -> None:
    with raw_connection(address) as connection:
        connection.sendall(GET * 20 + bad + GET)
        assert read_to_end(connection).count(ANSWER) == 20
