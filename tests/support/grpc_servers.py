"""Real ``aftserve`` processes with a port for gRPC, and raw calls of their methods."""

import re
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from servers import serving

from aftserve.grpc.wire_types import MESSAGES, SERVICE

Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class GrpcServer:
    """A server: its URL, its address for gRPC, its process and the file of its log."""

    http: str
    grpc: str
    process: "subprocess.Popen[bytes]"
    log: Path


@contextmanager
def serving_grpc(bundle: Path, log: Path, *options: str) -> Iterator[GrpcServer]:
    """Yield a server once it answers."""
    with serving(bundle, log, "--grpc-port", "0", *options) as (address, process):
        found = re.search(r"gRPC running on (\S+)", log.read_text("utf-8"))
        assert found is not None
        yield GrpcServer(address, found[1], process, log)


def infer_request(name: str, *inputs: dict[str, Any], **fields: Any) -> Any:
    return MESSAGES["ModelInferRequest"](model_name=name, inputs=inputs, **fields)


def ids_request(name: str, *rows: list[int], **fields: Any) -> Any:
    """Return a request of token ids in ``contents``, all of one length."""
    return infer_request(
        name,
        {
            "name": "input_ids",
            "datatype": "INT64",
            "shape": [len(rows), len(rows[0])],
            "contents": {"int64_contents": [one for row in rows for one in row]},
        },
        **fields,
    )


def method(channel: grpc.Channel, name: str) -> Any:
    """Return a method of the protocol, which takes and returns messages of aftserve."""
    return channel.unary_unary(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=MESSAGES[f"{name}Response"].FromString,
    )


_DATA, _HEADERS, RESET, _SETTINGS, PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS = 1, 4
_INITIAL_WINDOW_SIZE = 4
_STREAM = 1
_PART_BYTES = 1 << 14


def call_unread(
    address: str,
    path: str,
    message: bytes = b"",
    metadata: Sequence[tuple[str, str]] = (),
    *,
    announced_bytes: int | None = None,
) -> socket.socket:
    """Return the connection of a call of gRPC, whose window for the answer is 0 bytes.

    ``announced_bytes`` is the size of the message by its prefix, if more of it is to come.
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
        *metadata,
    ]
    size = len(message) if announced_bytes is None else announced_bytes
    content = b"\0" + size.to_bytes(4, "big") + message
    parts = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
    end = _END_STREAM if announced_bytes is None else 0
    connection.sendall(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        + _frame(_HEADERS, _END_HEADERS, _STREAM, b"".join(_field(*one) for one in headers))
        + b"".join(_frame(_DATA, 0, _STREAM, one) for one in parts[:-1])
        + _frame(_DATA, end, _STREAM, parts[-1])
    )
    return connection


def read_more(connection: socket.socket, count: int) -> None:
    """Let the server send further bytes of the answer."""
    connection.sendall(_frame(_WINDOW_UPDATE, 0, _STREAM, struct.pack(">I", count)))


def reset(connection: socket.socket) -> None:
    """Cancel the call."""
    connection.sendall(_frame(RESET, 0, _STREAM, struct.pack(">I", 8)))


def ping(connection: socket.socket) -> None:
    """Send a ping."""
    connection.sendall(_frame(PING, 0, 0, bytes(8)))


def frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Yield the kind and the content of each frame until the server closes the connection."""
    with connection.makefile("rb") as file:
        while head := file.read(9):
            yield head[3], file.read(int.from_bytes(head[:3], "big"))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


def _field(name: str, value: str) -> bytes:
    """A header of HPACK, literal and without an index."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
