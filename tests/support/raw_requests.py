"""Requests as bytes, and their responses until the server closes the connection."""

import json
import socket

from clients import head, raw_connection, response

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
ANSWER = b'{"status":"alive"}'
"""Body of the response to ``GET``."""
BODY = b'{"text": "ab"}'
POST = head(len(BODY)) + BODY
CHUNKED = b"Transfer-Encoding: chunked"
"""Header of ``head(None)`` that names the coding of the body."""


def read_to_end(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    received = bytearray()
    while part := connection.recv(65536):
        received += part
    return bytes(received)


def refusal(address: str, sent: bytes) -> tuple[int, str]:
    """Return the status and the detail of a response that closes the connection."""
    with raw_connection(address) as connection:
        connection.sendall(sent)
        status, body = response(connection)
        assert connection.recv(1) == b""
    return status, json.loads(body)["detail"]
