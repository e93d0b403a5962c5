"""Compressed request bodies, by the expander, by the middleware and by a server."""

import asyncio
import gzip
import io
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from clients import eventually, head, http, metric, raw_connection, response
from hypothesis import given
from hypothesis import strategies as st

from aftserve.errors import BusyError
from aftserve.http.body_limits import (
    CODINGS,
    BodyExpander,
    BodyLimitMiddleware,
    BodyTooLargeError,
    BrokenBodyError,
    SlowClientError,
    coding_of,
    zstd,
)

MIB = 1 << 20
COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd.compress}
ZEROS = bytes(64 * MIB)


def expand(coding: str, parts: list[bytes], max_bytes: int = 1 << 16) -> bytes:
    """Return the expanded body, in steps."""
    expander, expanded = BodyExpander(coding), list[bytes]()
    for part in parts:
        expander.feed(part)
        while not expander.needs_input:
            expanded.append(expander.step(max_bytes))
            assert len(expanded[-1]) <= max_bytes
    expander.finish()
    return b"".join(expanded)


@given(
    coding=st.sampled_from(CODINGS),
    members=st.lists(st.binary(max_size=300).map(lambda one: one * 40), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 2000), max_size=5),
    max_bytes=st.integers(1, 500),
)
def test_any_parts_expand_to_body(
    coding: str, members: list[bytes], cuts: list[int], max_bytes: int
) -> None:
    """A body may have several members or frames, and arrive in any parts."""
    body = b"".join(map(COMPRESS[coding], members))
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    parts = [body[a:b] for a, b in pairwise(edges)]
    assert expand(coding, parts, max_bytes) == b"".join(members)


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("content", [b"a" * 100_000, np.random.default_rng(0).bytes(100_000)])
def test_damaged_body_is_refused(coding: str, content: bytes) -> None:
    body = COMPRESS[coding](content)
    assert expand(coding, [body]) == content
    for damaged in (body[:-1], body[: len(body) // 2], body[:3], b"", b"hello", body + b"hello"):
        with pytest.raises(BrokenBodyError, match=coding):
            expand(coding, [damaged])


@pytest.mark.parametrize("cut", [1, 17, 5000, 100_000])
def test_zeros_after_gzip_are_ignored(cut: int) -> None:
    """As gzip and Python's gzip do: tapes and disks fill their last block with zeros."""
    member, zeros = gzip.compress(b"a" * 100_000), bytes(9000)
    for body, content in (
        (member + zeros, b"a" * 100_000),
        (member + zeros + member + bytes(1), b"a" * 200_000),
    ):
        parts = [body[start : start + cut] for start in range(0, len(body), cut)]
        assert expand("gzip", parts) == content == gzip.decompress(body)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(b"a") + bytes(5000) + b"hello"),
        ("gzip", gzip.compress(b"a") + bytes(5000) + gzip.compress(b"a")[:-1]),
        ("gzip", bytes(5000) + gzip.compress(b"a")),
        ("gzip", bytes(5000)),
        ("zstd", zstd.compress(b"a") + bytes(5000)),
    ],
)
def test_zeros_elsewhere_are_refused(coding: str, body: bytes) -> None:
    with pytest.raises(BrokenBodyError):
        expand(coding, [body])


def test_changed_checksum_is_refused() -> None:
    body = bytearray(gzip.compress(b"a" * 1000))
    body[-6] ^= 1
    with pytest.raises(BrokenBodyError):
        expand("gzip", [bytes(body)])


def test_large_window_is_refused() -> None:
    """A window of 16 MiB would be allocated for each request; RFC 9659 allows 8 MiB."""
    parameters = zstd.CompressionParameter
    for log, is_allowed in ((23, True), (24, False)):
        options = {parameters.window_log: log, parameters.content_size_flag: 0}
        compressor = zstd.ZstdCompressor(options=options)
        # A frame whose first part is compressed before its end names the window.
        body = compressor.compress(b"a") + compressor.flush()
        if is_allowed:
            assert expand("zstd", [body]) == b"a"
        else:
            with pytest.raises(BrokenBodyError):
                expand("zstd", [body])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "identity"),
        ([b""], "identity"),
        ([b" GZIP "], "gzip"),
        ([b"x-gzip"], "gzip"),
        ([b"zstd"], "zstd"),
        ([b"gzip, zstd"], "gzip, zstd"),
        ([b"gzip", b"gzip"], "gzip,gzip"),
    ],
)
def test_coding_is_read_from_headers(values: list[bytes], expected: str) -> None:
    headers = [(b"host", b"x"), *((b"content-encoding", value) for value in values)]
    assert coding_of(headers) == expected


def scope_of(body: bytes, coding: str) -> dict[str, Any]:
    headers = [(b"content-encoding", coding.encode()), (b"content-length", b"%d" % len(body))]
    return {"type": "http", "headers": headers, "state": {"started": time.monotonic()}}


def receive_all(
    body: bytes, coding: str, *, max_bytes: int, max_buffered: int, seconds: float = 60
) -> int:
    """Receive a body through the middleware, and return the number of its expanded bytes."""
    sizes = list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            sizes.append(len(message["body"]))
            more = message["more_body"]
        assert limits.buffer.held == sum(sizes)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None: ...

    limits = BodyLimitMiddleware(app, max_bytes, max_buffered, seconds)
    try:
        asyncio.run(limits(scope_of(body, coding), receive, send))
    finally:
        assert limits.buffer.held == 0
    return sum(sizes)


@pytest.mark.parametrize("coding", CODINGS)
def test_bomb_is_refused_without_its_memory(coding: str) -> None:
    bomb = COMPRESS[coding](ZEROS)
    assert len(bomb) < MIB // 8
    tracemalloc.start()
    try:
        with pytest.raises(BodyTooLargeError, match=f"after expansion have at most {MIB} bytes"):
            receive_all(bomb, coding, max_bytes=MIB, max_buffered=64 * MIB)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_expanded_bytes_fill_the_buffer() -> None:
    body = zstd.compress(ZEROS[:MIB])
    assert receive_all(body, "zstd", max_bytes=MIB, max_buffered=MIB) == MIB
    with pytest.raises(BusyError):
        receive_all(body, "zstd", max_bytes=MIB, max_buffered=MIB - 1)


@pytest.mark.parametrize(("coding", "window_bytes"), [("gzip", 1 << 15), ("zstd", 8 * MIB)])
def test_window_of_file_body_fills_buffer(coding: str, window_bytes: int) -> None:
    """A body that goes to a file is not held, but its stream keeps its past output."""
    held = list[int]()
    body = COMPRESS[coding](ZEROS[: 10 * MIB])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["body"].allow(64 * MIB)
        while (await receive())["more_body"]:
            held.append(limits.buffer.held)
        assert limits.buffer.held == 0  # the stream is gone

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def run(max_buffered: int) -> None:
        limits.buffer.max_bytes = max_buffered
        await limits(scope_of(body, coding), receive, receive)

    limits = BodyLimitMiddleware(app, MIB, window_bytes, 60)
    asyncio.run(run(window_bytes))
    assert max(held) == window_bytes
    with pytest.raises(BusyError):
        asyncio.run(run(window_bytes - 1))
    assert limits.buffer.held == 0


def test_empty_members_leave_turns_to_others() -> None:
    """100,000 empty members expand to nothing, so that no limit on sizes would end their work."""
    body = zlib.compress(b"", wbits=31) * 100_000
    turns = 0

    async def watch() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def app(scope: Any, receive: Any, send: Any) -> None:
        watching = asyncio.create_task(watch())
        assert (await receive())["body"] == b""
        watching.cancel()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    limits = BodyLimitMiddleware(app, 16 * MIB, 16 * MIB, 60)
    asyncio.run(limits(scope_of(body, "gzip"), receive, receive))
    assert turns > len(body) // 4096  # each step has at most as many bytes


@pytest.mark.parametrize("content", [b"", b"a"])
@pytest.mark.parametrize("coding", CODINGS)
def test_long_expansion_is_refused(coding: str, content: bytes) -> None:
    """The whole body is there at once, so that only its expansion takes time."""
    body = COMPRESS[coding](content) * 100_000
    with pytest.raises(SlowClientError, match=r"expanded within 0\.1 s"):
        receive_all(body, coding, max_bytes=16 * MIB, max_buffered=16 * MIB, seconds=0.1)


def npy(ids: list[int]) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(ids))
    return file.getvalue()


BODIES = {
    "application/json": json.dumps({"text": "An invoice."}).encode(),
    "text/plain": b"An invoice.",
    "application/x-ndjson": b'{"text": "An invoice."}\n{"text": "Another."}\n',
    "application/x-npy": npy([7, 8, 9]),
}


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("kind", BODIES)
def test_compressed_body_gets_same_answer(kind: str, coding: str, address: str) -> None:
    def answers(content: bytes, **more: str) -> list[dict[str, float]]:
        headers = {"Content-Type": kind, **more}
        answer = http.post(f"{address}/infer", content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        return [json.loads(line)["scores"] for line in answer.text.splitlines()]

    plain = answers(BODIES[kind])
    compressed = answers(COMPRESS[coding](BODIES[kind]), **{"Content-Encoding": coding})
    assert [*map(pytest.approx, plain)] == compressed


def test_compressed_tensors_are_read(address: str) -> None:
    name = next(iter(http.get(f"{address}/v2/models/model").json()["versions"]))
    tensor = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [7, 8, 9]}
    body = gzip.compress(json.dumps({"inputs": [tensor]}).encode())
    answer = http.post(
        f"{address}/v2/models/model/versions/{name}/infer",
        content=body,
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", CODINGS)
def test_server_refuses_bomb(coding: str, address: str) -> None:
    before = metric(address, "process_resident_memory_bytes")
    answer = post(address, COMPRESS[coding](ZEROS), coding)
    assert answer.status_code == 413
    assert "after expansion" in answer.json()["detail"]
    assert metric(address, "process_resident_memory_bytes") < before + 48 * MIB


@pytest.mark.parametrize("coding", CODINGS)
def test_text_bomb_stops_at_tokens(coding: str, address: str) -> None:
    answer = post(address, COMPRESS[coding](b"a" * 8 * MIB), coding, "text/plain")
    assert answer.status_code == 413
    assert "at most 6000 tokens" in answer.json()["detail"]


@pytest.mark.parametrize("coding", CODINGS)
def test_broken_body_gets_400(coding: str, address: str) -> None:
    whole = COMPRESS[coding](BODIES["application/json"])
    for body in (b"hello", whole[:-2]):
        answer = post(address, body, coding)
        assert answer.status_code == 400
        assert coding in answer.json()["detail"]


@pytest.mark.parametrize("coding", ["br", "deflate", "gzip, gzip", "gzip, br"])
def test_unknown_coding_gets_415(coding: str, address: str) -> None:
    answer = post(address, BODIES["application/json"], coding)
    assert answer.status_code == 415
    assert answer.headers["Accept-Encoding"] == "gzip, zstd"
    assert "must be gzip or zstd, got " in answer.json()["detail"]


def test_body_arrives_in_chunks(address: str) -> None:
    body = gzip.compress(BODIES["application/json"])
    with raw_connection(address) as connection:
        connection.sendall(head(None, "Content-Encoding: gzip"))
        for byte in body:
            connection.sendall(b"1\r\n%b\r\n" % bytes([byte]))
        connection.sendall(b"0\r\n\r\n")
        status, content = response(connection)
    assert status == 200, content


def test_client_that_leaves_is_dropped(address: str) -> None:
    before = metric(address, "aftserve_responses_total", path="/infer", status="499")
    with raw_connection(address) as connection:
        connection.sendall(head(1000, "Content-Encoding: gzip") + gzip.compress(b"a" * 100)[:20])

    def is_counted() -> bool:
        return metric(address, "aftserve_responses_total", path="/infer", status="499") > before

    eventually(is_counted, "the request is counted")


def post(address: str, body: bytes, coding: str, kind: str = "application/json") -> httpx.Response:
    headers = {"Content-Encoding": coding, "Content-Type": kind}
    return http.post(f"{address}/infer", content=body, headers=headers)
