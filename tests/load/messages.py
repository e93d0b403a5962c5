"""The bytes of a request or a response."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Found = dict[str, Any]
"""The fields of ``every_head.Expected`` that a response carries for one document."""


@dataclass(frozen=True)
class Message:
    """A request or a response."""

    body: bytes  # or the protobuf message of gRPC
    # Those of a response are in lower case.
    headers: Mapping[str, str] = field(default_factory=dict)


def json_message(**fields: Any) -> Message:
    """Return a message with an object of JSON."""
    return Message(json.dumps(fields).encode())
