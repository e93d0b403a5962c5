"""Bytes of requests and responses that the server writes itself, without an application."""

import json
from collections.abc import Iterable

from aftserve.http.uvicorn_internals import STATUS_LINE


def refusal(status: int, problem: str) -> bytes:
    """Return a response that ends the connection, for a request that no application gets."""
    content = json.dumps({"detail": problem}).encode()
    headers = (
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n"
        "connection: close\r\n\r\n"
    )
    return STATUS_LINE[status] + headers.encode() + content


def headers_without_upgrade(
    method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> bytes:
    """Return the headers of a request without its upgrade to another protocol."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
