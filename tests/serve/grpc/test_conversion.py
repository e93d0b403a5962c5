"""Tensors of gRPC become the documents that HTTP reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from grpc_servers import ids_request, infer_request

from aftexport.bundle.bundle import Bundle
from aftexport.errors import InputError
from aftserve.api.open_inference.messages import Message
from aftserve.grpc.infer_request import split_request
from aftserve.grpc.methods import input_bytes, read_request

_MAX_BYTES = 1 << 20


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
