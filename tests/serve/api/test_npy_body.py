"""Documents of features in .npy files and lists, and .npy files of token ids."""

import struct
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from clients import http, raw_connection, response
from input_models import FEATURES, MEAN, NAMES, SCALE, Sensors
from numpy.typing import NDArray

from aftserve.client import Client, TooLongError

NPY = "application/x-npy"
TWO_GIB = 1 << 31
LONG = 70_000
"""Tokens of a document over the memory budget, whose features are kept in a file."""
MAX_TOKENS = 450_000
INFER = "/v2/models/model/infer"


@pytest.fixture
def address(feature_server: str) -> str:
    return feature_server


def measured(tokens: int) -> NDArray[np.float32]:
    """Return values as a sensor would measure them."""
    values = np.random.default_rng(tokens).standard_normal((tokens, FEATURES), np.float32)
    return values * np.float32(SCALE) + np.float32(MEAN)


def scores(document: NDArray[np.float32]) -> list[float]:
    """Return PyTorch's scores in float64."""
    normalized = (document - np.float32(MEAN)) / np.float32(SCALE)
    with torch.inference_mode():
        wide = torch.from_numpy(normalized).double()[None]
        logits = Sensors().double().eval()(wide, torch.tensor([len(document)]))
    probabilities: list[float] = torch.softmax(logits[0], 0).tolist()
    return probabilities


def saved(array: NDArray[Any], *, version: tuple[int, int] | None = None) -> bytes:
    file = BytesIO()
    np.lib.format.write_array(file, array, version, allow_pickle=True)
    return file.getvalue()


def post(address: str, content: bytes, kind: str = NPY) -> httpx.Response:
    return http.post(f"{address}/infer", content=content, headers={"Content-Type": kind})


def checked(answer: httpx.Response, document: NDArray[np.float32]) -> None:
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert list(content["scores"].values()) == pytest.approx(scores(document), abs=1e-4)
    assert content["tokens_total"] == len(document)


@pytest.mark.parametrize("tokens", [1025, LONG])
def test_file_has_answer_of_pytorch(address: str, tokens: int) -> None:
    document = measured(tokens)
    checked(post(address, saved(document)), document)
    checked(post(address, saved(document, version=(2, 0)), "application/octet-stream"), document)


@pytest.mark.parametrize("kind", ["<f2", "<f8", ">f4"])
def test_other_floats_are_converted(address: str, kind: str) -> None:
    document = measured(30).astype(np.dtype(kind))
    checked(post(address, saved(document)), document.astype(np.float32))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"datatype": "INT64", "data": [1, 2, 3, 4]}, "must be FP32 [documents, tokens, 4]"),
        ({"shape": [1, 4], "data": [1, 2, 3, 4]}, "must be FP32 [documents, tokens, 4]"),
        ({"shape": [1, 1, 3], "data": [1, 2, 3]}, "must be FP32 [documents, tokens, 4]"),
        ({"data": [1, 2, 3]}, "must have 4 values by its shape"),
        ({"data": [1, 2, 3, True]}, "must hold only numbers"),
        ({"data": [1, 2, 3, 1e300]}, "expected finite float32 values, got 1e+300"),
        ({"data": [[[1, 2], [3, 4]]]}, "must have 1 values"),
        ({"name": "input_ids", "data": [1]}, "must be input_features, or"),
    ],
)
def test_protocol_refuses_other_tensors(address: str, tensor: dict[str, Any], said: str) -> None:
    whole = {"name": "input_features", "datatype": "FP32", "shape": [1, 1, 4]} | tensor
    answer = http.post(f"{address}{INFER}", json={"inputs": [whole]})
    assert (answer.status_code, said in answer.text) == (422, True), answer.text


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([[1, 2, 3]], "Token 0 must be a list of 4 numbers, got 3 values"),
        ([[1, 2, 3, 4], 5], "Token 1 must be a list of 4 numbers, got int"),
        ([[1, 2, 3, "4"]], "Token 0 must hold only numbers"),
        ([[1, 2, 3, False]], "Token 0 must hold only numbers"),
        ([[1, 2, 3, 1e39]], "got 1e+39 for the feature 'depth' of token 0"),
        ([[1, 2, 3, 10**400]], "outside the range of float32"),
        ([1, 2], "3 levels of brackets, [documents, tokens, features], got 2; add one level"),
        ([[[1, 2]]], "got 4; remove one level"),
        ([], "no tokens"),
    ],
)
def test_lists_are_checked(address: str, document: list[Any], said: str) -> None:
    answer = http.post(f"{address}/infer", json={"input_features": [document]})
    assert (answer.status_code, said in answer.text) == (422, True), answer.text


def test_ids_are_refused(address: str) -> None:
    answer = http.post(f"{address}/infer", json={"input_ids": [[1, 2, 3]]})
    assert (answer.status_code, answer.json()["detail"]) == (
        422,
        "document 0: This model takes input_features, got input_ids. Send input_features.",
    )


def header(text: str, magic: bytes = b"\x93NUMPY\x01\x00") -> bytes:
    return magic + struct.pack("<H", len(text)) + text.encode()


GOOD = saved(np.zeros((3, FEATURES), np.float32))
BAD: dict[str, tuple[bytes, str]] = {
    "integers": (saved(np.zeros((3, 4), np.int64)), "must be features float32 [tokens, 4]"),
    "wide": (saved(np.zeros((3, 5), np.float32)), "got float32 [3, 5]"),
    "flat": (saved(np.zeros(4, np.float32)), "got float32 [4]"),
    "cube": (saved(np.zeros((1, 3, 4), np.float32)), "got float32 [1, 3, 4]"),
    "fortran": (saved(np.asfortranarray(np.zeros((3, 4), np.float32))), "Fortran order"),
    "objects": (saved(np.array([[1, 2, 3, 4]], object)), "must be features float32"),
    "complex": (saved(np.zeros((3, 4), np.complex64)), "must be features float32"),
    "empty": (saved(np.zeros((0, 4), np.float32)), "no tokens"),
    "nothing": (b"", "incomplete header"),
    "other bytes": (b'{"input_features": 1}', "must be a .npy file, got other bytes"),
    "cut header": (GOOD[:60], "incomplete header"),
    "cut values": (GOOD[:-1], "bytes by the header of the .npy file"),
    "more values": (GOOD + b"\0", "bytes by the header of the .npy file"),
    "version 3": (saved(np.zeros((3, 4), np.float32), version=(3, 0)), "got 3.0"),
    "no literal": (header("__import__('os').getcwd()\n"), "header of the .npy file is damaged"),
    "nested": (header("(" * 9000 + "\n"), "header of the .npy file is damaged"),
    "negative": (
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}\n"),
        "header of the .npy file is damaged",
    ),
    "huge header": (header("x" * 20_000), "at most 10000 bytes, got 20000"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused(address: str, name: str) -> None:
    content, said = BAD[name]
    answer = post(address, content)
    status = 415 if name == "other bytes" else 422
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


@pytest.mark.parametrize("token", [0, 1, LONG - 1])
def test_bad_value_error_names_its_place(address: str, token: int) -> None:
    document = measured(LONG)
    document[token, 2] = np.nan
    answer = post(address, saved(document))
    assert answer.status_code == 422
    said = f"expected finite float32 values, got nan for the feature 'speed' of token {token}"
    assert said in answer.text


def declared(tokens: int) -> bytes:
    """Return only the header of a file."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({tokens}, 4), }}"
    return header(text + " " * (117 - len(text)) + "\n")


def announced(length: int | None) -> bytes:
    kind = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    lines = ["POST /infer HTTP/1.1", "Host: localhost", f"Content-Type: {NPY}", kind, "", ""]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (TWO_GIB // (4 * FEATURES), "The body must have at most 8388608 bytes"),
        ((8 << 20) // (4 * FEATURES), "at most 8388608 bytes"),  # so the header exceeds it
        (MAX_TOKENS + 1, f"at most {MAX_TOKENS} tokens, got {MAX_TOKENS + 1}"),
    ],
    ids=["2 GiB", "values of maximum size", "tokens"],
)
def test_size_is_refused_by_header(tokens: int, said: str, is_chunked: bool, address: str) -> None:
    """The server answers although no value is ever sent."""
    start = declared(tokens)
    length = None if is_chunked else len(start) + 4 * FEATURES * tokens
    part = f"{len(start):x}\r\n".encode() + start + b"\r\n" if is_chunked else start
    with raw_connection(address) as connection:
        connection.sendall(announced(length) + part)
        status, body = response(connection)
    assert (status, said in body.decode()) == (413, True), body


def test_values_beyond_header_are_refused(address: str) -> None:
    """The length of a chunked body is only known at its end."""
    start = declared(2)
    parts = [start, b"\0" * 32, b"\0"]
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts)
    with raw_connection(address) as connection:
        connection.sendall(announced(None) + chunks + b"0\r\n\r\n")
        status, body = response(connection)
    assert (status, b"must have 32 bytes by its header, got more" in body) == (422, True), body


def test_body_over_other_limit_is_stored(address: str) -> None:
    """The limit of 16 MiB for other bodies does not hold for files, nor that of the buffer."""
    document = measured(400_000)
    checked(post(address, saved(document)), document)


def test_unknown_encoding_is_refused(address: str) -> None:
    headers = {"Content-Type": NPY, "Content-Encoding": "br"}
    assert http.post(f"{address}/infer", content=GOOD, headers=headers).status_code == 415


def test_info_describes_features(address: str) -> None:
    info = http.get(f"{address}/info").json()
    assert info["features"] == {"names": [*NAMES], "mean": [*MEAN], "scale": [*SCALE]}
    assert info["vocab_size"] is None
    assert info["limits"]["max_array_bytes"] == 8 * 1024 * 1024
    (features, lengths) = http.get(f"{address}/v2/models/model").json()["inputs"]
    assert features == {"name": "input_features", "datatype": "FP32", "shape": [-1, -1, FEATURES]}
    assert lengths["name"] == "lengths"
    schemas = http.get(f"{address}/openapi.json").json()["components"]["schemas"]
    (form,) = schemas["InferRequest"]["oneOf"]
    assert form["required"] == ["input_features"]


def test_evidence_of_long_file_names_tokens(address: str) -> None:
    content = saved(measured(LONG))
    headers = {"Content-Type": NPY}
    answer = http.post(f"{address}/infer?evidence=3", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    evidence = answer.json()["evidence"]
    assert evidence["spans"]
    for span in evidence["spans"]:
        assert 0 <= span["start_token"] < span["end_token"] <= LONG
        assert "text" not in span


def test_client_names_size_limit(address: str) -> None:
    with Client(address) as client, pytest.raises(TooLongError, match="at most 8388608 bytes"):
        client.infer(features=np.zeros((600_000, FEATURES), np.float32))


def test_reference_runs_features(address: str) -> None:
    content = {"input_features": measured(20).tolist()}
    answer = http.post(f"{address}/parity", json=content, timeout=120)  # it imports PyTorch
    assert answer.status_code == 200, answer.text
    assert (answer.json()["within"], answer.json()["tokens"]) == (True, 20)


@pytest.mark.parametrize("kind", ["<i8", "<i4", ">i8"])
def test_ids_of_file_equal_list(server: str, kind: str) -> None:
    ids = np.arange(50).astype(np.dtype(kind))
    answer = post(server, saved(ids))
    assert answer.status_code == 200, answer.text
    (listed,) = http.post(f"{server}/infer", json={"input_ids": [ids.tolist()]}).json()["results"]
    assert answer.json()["scores"] == pytest.approx(listed["scores"], abs=1e-6)


@pytest.mark.parametrize(
    ("array", "status", "said"),
    [
        (np.zeros(3, np.float32), 422, "must be token ids int64 [tokens], got float32 [3]"),
        (np.zeros((3, 4), np.float32), 422, "must be token ids int64"),
        (np.zeros(3, np.int16), 422, "must be token ids int64"),
        (np.full(3, 300), 422, "Token id 300 is outside the vocabulary"),
        (np.zeros(6001, np.int64), 413, "at most 6000 tokens, got 6001"),
    ],
)
def test_bad_ids_of_file_are_refused(
    server: str, array: NDArray[Any], status: int, said: str
) -> None:
    answer = post(server, saved(array))
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


def test_model_of_ids_refuses_features(server: str) -> None:
    answer = http.post(f"{server}/infer", json={"input_features": [[[1.0, 2.0]]]})
    assert (answer.status_code, "takes input_ids, got input_features" in answer.text) == (422, True)
