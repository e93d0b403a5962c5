"""The table of messages against the definition that Triton's client was compiled from."""

from typing import Any

import pytest
import tritonclient.grpc.service_pb2 as official

from aftexport.errors import InputError
from aftserve.grpc.wire_types import MESSAGES, parse


def described(message: Any) -> dict[str, Any]:
    """Name, number, type and repetition of every field, and the fields of inner messages."""
    return {
        one.name: (
            one.number,
            one.type,
            one.is_repeated,
            one.containing_oneof.name if one.containing_oneof else None,
            described(one.message_type) if one.message_type else None,
        )
        for one in message.fields
    }


@pytest.mark.parametrize("name", MESSAGES)
def test_message_follows_official_definition(name: str) -> None:
    ours = MESSAGES[name].DESCRIPTOR
    theirs = official.DESCRIPTOR.message_types_by_name[name]
    assert ours.full_name == theirs.full_name
    assert described(ours) == described(theirs)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(InputError, match=r"Expected a message inference\.ModelInferRequest"):
        parse("ModelInferRequest", b"\xff\xff\xff")
