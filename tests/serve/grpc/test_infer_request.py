"""The values of a ModelInferRequest, which protobuf does not parse."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grpc_servers import ids_request, infer_request

from aftexport.errors import InputError
from aftserve.errors import DocumentTooLongError
from aftserve.grpc.call import Call
from aftserve.grpc.infer_request import split_request
from aftserve.grpc.methods import Methods, input_bytes
from aftserve.grpc.wire_types import MESSAGES

_MAX_BYTES = 1 << 20
_REPEATS = 1 << 21


def values(content: bytes) -> list[bytes]:
    return [bytes(one) for one in input_bytes(split_request(content), _MAX_BYTES)]


def tensor(datatype: str, field: str, given: Any) -> bytes:
    shape, contents = [len(given)], {field: given}
    one = {"name": "x", "datatype": datatype, "shape": shape, "contents": contents}
    content: bytes = infer_request("m", one).SerializeToString()
    return content


def nested(number: int, content: bytes) -> bytes:
    """Return a field of bytes."""
    size, parts = len(content), bytearray()
    while size > 0x7F:
        parts.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *parts, size]) + content


def with_contents(datatype: bytes, contents: bytes) -> bytes:
    return nested(5, nested(1, b"x") + nested(2, datatype) + nested(5, contents))


def extremes(kind: str) -> list[int]:
    limits = np.iinfo(kind)
    powers = [1 << bits for bits in range(limits.bits - 1)]
    return [limits.min, limits.max, *(sign * one for one in powers for sign in (-1, 0, 1))]


@pytest.mark.parametrize(
    ("datatype", "field", "given", "kind"),
    [
        ("INT64", "int64_contents", extremes("int64"), "<i8"),
        ("INT32", "int_contents", extremes("int32"), "<i4"),
        ("BOOL", "bool_contents", [True, False, True], "?"),
        ("FP32", "fp32_contents", [1.5, -0.0, np.inf, 1e-40], "<f4"),
        ("INT64", "int64_contents", [], "<i8"),
    ],
    ids=["int64", "int32", "bool", "fp32", "nothing"],
)
def test_numbers_keep_their_bits(datatype: str, field: str, given: list[Any], kind: str) -> None:
    assert values(tensor(datatype, field, given)) == [np.array(given, kind).tobytes()]


def test_numbers_across_blocks_are_whole() -> None:
    """Two blocks of a mebibyte meet within a number."""
    given = [1] + [1 << 20] * (_MAX_BYTES // 8 - 1) + [7]
    content = tensor("INT64", "int64_contents", given)
    (found,) = input_bytes(split_request(content), 2 * _MAX_BYTES)
    assert np.array_equal(np.frombuffer(found, "<i8"), given)


def test_single_values_join_packed_ones() -> None:
    """Protobuf allows packed values and one in each field, in any order and several messages."""
    contents = nested(3, b"\1\2") + b"\x18\3" + nested(3, b"") + nested(3, b"\xac\2")
    inputs = [nested(2, b"INT64"), nested(5, contents), nested(1, b"x"), nested(5, b"\x18\4")]
    whole = nested(5, b"".join(inputs))
    official = MESSAGES["ModelInferRequest"].FromString(whole).inputs[0].contents.int64_contents
    assert np.frombuffer(values(whole)[0], "<i8").tolist() == [*official] == [1, 2, 3, 300, 4]


def test_plain_fields_reach_protobuf() -> None:
    request = ids_request("m", [5, 6], id="one", outputs=[{"name": "label"}])
    request.inputs[0].parameters["any"].string_param = "kept"
    split = split_request(request.SerializeToString()).message
    assert (split.model_name, split.id, split.outputs[0].name) == ("m", "one", "label")
    assert list(split.inputs[0].shape) == [1, 2]
    assert split.inputs[0].parameters["any"].string_param == "kept"
    assert not split.inputs[0].HasField("contents")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (with_contents(b"BYTES", b"\x42\0" * _REPEATS), "at most 16384 fields"),
        (with_contents(b"INT64", b"\x18\5" * _REPEATS), "at most 16384 fields"),
        (b"\x3a\0" * _REPEATS, "at most 16384 fields"),
        (b"\x2a\0" * _REPEATS, "at most 16384 fields"),
        (b"\x32\0" * _REPEATS, "at most 16384 fields"),
        (b"\x22\0" * _REPEATS, "at most 16384 fields"),
        (b"\xf8\1\0" * _REPEATS, "at most 16384 fields"),
        (nested(6, b"\x12\0" * _REPEATS), "bytes of names"),
        (nested(5, nested(3, b"\1" * _REPEATS)), "bytes of names"),
        (nested(1, b"m" * _REPEATS), "bytes of names"),
    ],
    ids=[
        "texts", "single", "raw", "inputs", "outputs", "parameters", "unknown", "nested", "shape",
        "name",
    ],
)  # fmt: skip
def test_many_fields_are_refused(content: bytes, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        split_request(content)


@pytest.mark.parametrize("datatype", [b"INT64", b"INT32", b"BOOL"])
def test_many_integers_are_refused(datatype: bytes) -> None:
    field = {b"INT64": 3, b"INT32": 2, b"BOOL": 1}[datatype]
    content = with_contents(datatype, nested(field, b"\1" * (_MAX_BYTES // 8 + 1)))
    with pytest.raises(DocumentTooLongError, match="at most 1048576 bytes as INT64, got 1048584"):
        values(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[:-1],
        lambda content: content + b"\x0b",  # a group
        lambda content: content + b"\0\0",  # a field without a number
        lambda content: content + b"\xff" * 11,
        lambda content: content + nested(5, nested(5, b"\x1a\5\1")),
        lambda content: with_contents(b"INT64", nested(3, b"\x80")),
        lambda content: with_contents(b"INT64", nested(3, b"\x80" * 10 + b"\1")),
        lambda content: with_contents(b"FP32", nested(6, b"abc")),
    ],
    ids=["end", "group", "zero", "tag", "inner", "half", "long", "float"],
)
def test_broken_messages_are_refused(change: Callable[[bytes], bytes]) -> None:
    content = ids_request("m", [5, 6]).SerializeToString()
    with pytest.raises(InputError, match="got bytes that are not one"):
        values(change(content))


def test_cancelled_parsing_keeps_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is cancelled while its message is parsed does not let another one begin."""
    begun, running, most = threading.Event(), list[int](), list[int]()

    def split(content: bytes) -> None:
        running.append(1)
        most.append(len(running))
        begun.set()
        time.sleep(0.1)
        running.pop()
        raise InputError("Expected a message, got none.", "Send one.")

    async def check() -> None:
        methods, call = Methods(None), Call(0, math.inf, ())  # type: ignore[arg-type]
        first, second = (
            asyncio.create_task(methods._split(1 << 20, bytes(1 << 13), call)) for _ in range(2)
        )
        await asyncio.to_thread(begun.wait)
        first.cancel()
        with pytest.raises(InputError):
            await second

    monkeypatch.setattr("aftserve.grpc.methods.split_request", split)
    asyncio.run(check())
    assert most == [1, 1]
