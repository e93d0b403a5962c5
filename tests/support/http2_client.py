"""A raw client of HTTP/2 that lets the server send headers, and no byte of an answer."""

import socket
import struct

_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4


def call_unread(address: str, path: str) -> socket.socket:
    """Return the connection of a call of gRPC with an empty message, whose window is 0 bytes.

    Args:
        address: host and port.
        path: full name of the method.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", address),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        + _frame(_HEADERS, _END_HEADERS, 1, b"".join(_field(*one) for one in headers))
        + _frame(_DATA, _END_STREAM, 1, bytes(5))
    )
    return connection


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _field(name: str, value: str) -> bytes:
    """A header of HPACK, literal and without an index."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
