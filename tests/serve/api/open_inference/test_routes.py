"""Handwritten requests of the Open Inference Protocol, valid and invalid."""

import json
from typing import Any

import httpx
import pytest

INFER = "/v2/models/model/infer"


def text(*values: str, **more: Any) -> dict[str, Any]:
    return {"name": "text", "shape": [len(values)], "datatype": "BYTES", "data": values, **more}


def ids(data: Any, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"name": "input_ids", "shape": shape, "datatype": "INT64", "data": data, **more}


def lengths(*values: int) -> dict[str, Any]:
    return {"name": "lengths", "shape": [len(values)], "datatype": "INT64", "data": values}


def outputs(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return {output["name"]: output for output in response.json()["outputs"]}


def test_flat_and_nested_data_agree(client: httpx.Client) -> None:
    flat = client.post(INFER, json={"inputs": [ids([1, 2, 3, 4], [2, 2])]})
    nested = client.post(INFER, json={"inputs": [ids([[1, 2], [3, 4]], [2, 2])]})
    assert outputs(flat) == outputs(nested)


def test_null_fields_count_as_absent(client: httpx.Client) -> None:
    plain = client.post(INFER, json={"inputs": [text("a")], "outputs": [{"name": "label"}]})
    with_nulls = {
        "id": None,
        "parameters": None,
        "inputs": [text("a", parameters=None)],
        "outputs": [{"name": "label", "parameters": None}],
    }
    assert outputs(client.post(INFER, json=with_nulls)) == outputs(plain)
    all_null = {"inputs": [text("a")], "outputs": None, "parameters": {"binary_data_output": None}}
    assert outputs(client.post(INFER, json=all_null)) == outputs(
        client.post(INFER, json={"inputs": [text("a")]})
    )


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([text()], "at least one document"),
        ([text("a", shape=[2])], r"must have 2 values by its shape \[2\], got 1"),
        ([text("a", datatype="INT64")], "must be BYTES, got INT64"),
        ([text("a", datatype="FP64")], "datatype"),
        ([text("a", datatype="FP32")], "must be BYTES, got FP32"),
        ([text(*"ab", data=["a", 1])], "only texts"),
        ([text("a", data=None)], "no data"),
        ([text("a", shape=[-1])], "shape"),
        ([text("a", shape=[1, 1, 1])], "shape"),
        ([text("a", name="texts")], "The inputs must be .* got texts"),
        ([text("a"), ids([1], [1, 1])], "The inputs must be .* got text, input_ids"),
        ([text("a"), text("b")], "The inputs must be .* got text, text"),
        (
            [text("a", parameters={"binary_data_size": 5})],
            "must have 5 bytes after the JSON, got 0",
        ),
        ([lengths(1)], "The inputs must be .* got lengths"),
        ([ids([1, 2], [2])], r"integers \[documents, tokens\], got INT64 of 1 axes"),
        ([ids([], [0, 4])], "at least one document"),
        ([text(shape=[0, 10**30])], "shape"),
        ([ids([], [0, 1 << 62])], "shape"),
        ([ids([], [10**4000, 10**4000])], "shape"),
        ([ids(["a"], [1, 1], datatype="BYTES")], r"integers \[documents, tokens\], got BYTES"),
        ([ids([1], [1, 1]), lengths(1) | {"datatype": "BYTES"}], r"integers \[1\], got BYTES"),
        ([ids([], [1, 0])], "no tokens"),
        ([ids([[1], [2, 3]], [2, 2])], "rows"),
        ([ids([1.5], [1, 1])], "only integers"),
        ([ids([True], [1, 1])], "only integers"),
        ([ids([2**80], [1, 1])], "outside the range of INT64"),
        ([ids([10**6], [1, 1])], "outside the vocabulary"),
        ([ids([1, 2], [1, 2]), lengths(3)], "from 0 to 2, got 3"),
        ([ids([1, 2], [1, 2]), lengths(-1)], "from 0 to 2, got -1"),
        ([ids([1, 2], [1, 2]), lengths(1, 1)], r"integers \[1\], got INT64 of 2 values"),
        ([ids([1, 2], [1, 2]), lengths(0)], "no tokens"),
        ([], "inputs"),
        ("text", "inputs"),
    ],
)
def test_invalid_inputs_are_refused(client: httpx.Client, inputs: Any, reason: str) -> None:
    response = client.post(INFER, json={"inputs": inputs})
    assert response.status_code == 422, response.text
    assert response.json().keys() == {"error"}
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(response.json()["error"])


@pytest.mark.parametrize("size", ["99999", "-1", "many"])
def test_wrong_json_length_is_refused(client: httpx.Client, size: str) -> None:
    headers = {"Inference-Header-Content-Length": size}
    response = client.post(INFER, content=b"{}", headers=headers)
    assert response.status_code == 422
    assert "Inference-Header-Content-Length" in response.json()["error"]


def post_texts(client: httpx.Client, after: bytes, shape: list[int]) -> httpx.Response:
    parameters = {"binary_data_size": len(after)}
    tensor = {"name": "text", "shape": shape, "datatype": "BYTES", "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return client.post(INFER, content=head + after, headers=headers)


@pytest.mark.parametrize("after", [b"\x05", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00a"])
def test_truncated_binary_texts_are_refused(client: httpx.Client, after: bytes) -> None:
    response = post_texts(client, after, [1])
    assert response.status_code == 422
    assert "ends within a value" in response.json()["error"]


def test_excess_binary_texts_are_not_decoded(client: httpx.Client) -> None:
    not_utf8 = b"\x01\x00\x00\x00\xff"
    response = post_texts(client, not_utf8 * 300, [2, 150])
    assert response.status_code == 413
    assert "at most 256 documents, got 300" in response.json()["error"]
    response = post_texts(client, b"\x01\x00\x00\x00a" * 2 + not_utf8, [2])
    assert response.status_code == 422
    assert "more values than its shape [2]" in response.json()["error"]


@pytest.mark.parametrize("tensor", [text(*["a"] * 257), text(shape=[1, 257]), ids([], [257, 0])])
def test_too_many_documents_are_refused(client: httpx.Client, tensor: dict[str, Any]) -> None:
    response = client.post(INFER, json={"inputs": [tensor]})
    assert response.status_code == 413
    assert "at most 256 documents, got 257" in response.json()["error"]


@pytest.mark.parametrize(
    "path", ["/v2/nothing", "/v2/models/another", "/v2/models/model/versions/2/ready"]
)
def test_unknown_paths_get_404(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json().keys() == {"error"}
