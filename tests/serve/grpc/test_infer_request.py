"""The values of a ModelInferRequest, which protobuf does not parse."""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from grpc_servers import ids_request, infer_request

from aftexport.bundle.bundle import Bundle
from aftexport.errors import InputError
from aftserve.api.open_inference.messages import Message
from aftserve.errors import DocumentTooLongError
from aftserve.grpc.call import Call
from aftserve.grpc.infer_request import split_request
from aftserve.grpc.methods import Methods, input_bytes, read_request
from aftserve.grpc.wire_types import MESSAGES


def read(request: Any, bundle: Path) -> Message:
    manifest = Bundle.open(bundle).manifest
    split = split_request(request.SerializeToString())
    parts = input_bytes(split, _MAX_BYTES)
    return read_request(split, parts, max_documents=8, manifest=manifest, outputs=["label"])


def text(*values: bytes, **fields: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [len(values)], **fields}


def output(parameter: str, **value: Any) -> dict[str, Any]:
    return {"name": "label", "parameters": {parameter: value}}


def test_texts_are_read_from_contents_and_bytes(bundle_folder: Path) -> None:
    values = [b"one", "zwei ✉".encode()]
    listed = infer_request("m", text(*values, contents={"bytes_contents": values}))
    raw = b"".join(len(one).to_bytes(4, "little") + one for one in values)
    binary = infer_request("m", text(*values), raw_input_contents=[raw])
    for request in (listed, binary):
        assert read(request, bundle_folder).documents == ["one", "zwei ✉"]


@pytest.mark.parametrize(
    ("kind", "field"), [("INT64", "int64_contents"), ("INT32", "int_contents")]
)
def test_ids_are_cut_to_lengths(kind: str, field: str, bundle_folder: Path) -> None:
    ids = {"name": "input_ids", "datatype": kind, "shape": [2, 3],
           "contents": {field: [5, 6, 7, 8, 9, 0]}}  # fmt: skip
    lengths = {"name": "lengths", "datatype": "INT64", "shape": [2],
               "contents": {"int64_contents": [3, 2]}}  # fmt: skip
    documents = read(infer_request("m", ids, lengths), bundle_folder).documents
    assert [list(one) for one in documents] == [[5, 6, 7], [8, 9]]


@pytest.mark.parametrize("is_raw", [False, True])
def test_features_keep_their_bits(is_raw: bool, feature_bundle: Path) -> None:
    count = Bundle.open(feature_bundle).manifest.features.count  # type: ignore[union-attr]
    values = np.random.default_rng(3).standard_normal((1, 4, count)).astype(np.float32)
    tensor: dict[str, Any] = {"name": "input_features", "datatype": "FP32", "shape": values.shape}
    if is_raw:
        request = infer_request("m", tensor, raw_input_contents=[values.tobytes()])
    else:
        request = infer_request("m", {**tensor, "contents": {"fp32_contents": values.ravel()}})
    (document,) = read(request, feature_bundle).documents
    assert np.array_equal(np.asarray(document, np.float32), values[0])


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (infer_request("m", text(b"a"), raw_input_contents=[b"", b""]), "of 1 inputs, got 2"),
        (
            infer_request(
                "m", text(b"a", contents={"bytes_contents": [b"a"]}), raw_input_contents=[b"a"]
            ),
            "got both for 'text'",
        ),
        (
            infer_request("m", text(b"a", contents={"int64_contents": [1]})),
            "Expected bytes_contents of the BYTES input 'text', got int64_contents",
        ),
        (infer_request("m", text(b"\xff", contents={"bytes_contents": [b"\xff"]})), "UTF-8"),
        (infer_request("m", text(b"a")), "must have 1 values by its shape"),
        (ids_request("m", [5, 6], outputs=[{"name": "other"}]), "Expected outputs of the model"),
        (infer_request("m", *[text()] * 19), "at most 18 inputs, got 19"),
        (ids_request("m", [5], outputs=[{"name": "label"}] * 257), "at most 256 outputs, got 257"),
        (
            ids_request("m", [5], outputs=[output("classification", int64_param=3)]),
            "classification extension",
        ),
    ],
    ids=["count", "both", "field", "utf-8", "nothing", "output", "inputs", "outputs", "top"],
)
def test_wrong_tensors_are_refused(request_: Any, problem: str, bundle_folder: Path) -> None:
    with pytest.raises(InputError, match=problem):
        read(request_, bundle_folder)


def test_long_shape_is_refused(bundle_folder: Path) -> None:
    tensor = {"name": "input_ids", "datatype": "INT64", "shape": [1] * 100_000}
    with pytest.raises(RequestValidationError) as raised:
        read(infer_request("m", tensor), bundle_folder)
    assert "shape" in str(raised.value.errors())


def test_binary_output_is_not_requested(bundle_folder: Path) -> None:
    """Binary tensors of HTTP are sent without a limit, which a message of gRPC has."""
    request = ids_request("m", [5, 6], outputs=[output("binary_data", bool_param=True)])
    (wanted,) = read(request, bundle_folder).request.outputs or ()
    assert wanted.parameters is not None
    assert wanted.parameters.binary_data is None


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


async def test_cancelled_parsing_keeps_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is cancelled while its message is parsed does not let another one begin."""
    begun, running, most = threading.Event(), list[int](), list[int]()

    def split(content: bytes) -> None:
        running.append(1)
        most.append(len(running))
        begun.set()
        time.sleep(0.1)
        running.pop()
        raise InputError("Expected a message, got none.", "Send one.")

    monkeypatch.setattr("aftserve.grpc.methods.split_request", split)
    methods, call = Methods(None), Call(0, math.inf, ())  # type: ignore[arg-type]
    first, second = (
        asyncio.create_task(methods._split(1 << 20, bytes(1 << 13), call)) for _ in range(2)
    )
    await asyncio.to_thread(begun.wait)
    first.cancel()
    with pytest.raises(InputError):
        await second
    assert most == [1, 1]
