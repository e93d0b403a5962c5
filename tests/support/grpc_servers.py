"""Real ``aftserve`` processes with a port for gRPC, and raw calls of their methods."""

import re
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
    """A server."""

    http: str  # its URL
    grpc: str  # its address for gRPC
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
