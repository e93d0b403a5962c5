"""Triton's own HTTP client, unmodified, against the server."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tiny_models
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

MODEL = "model"
TEXTS = ["An invoice.", "Zwei Verträge: 契約 ✉", "long " * 300]


@pytest.fixture(scope="module")
def protocol(server: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(urlsplit(server).netloc) as client:
        yield client


def texts(values: list[str], *, binary: bool) -> triton.InferInput:
    tensor = triton.InferInput("text", [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array(values, dtype=object), binary_data=binary)
    return tensor


def answers(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    return list(client.post("/infer", json=body).json()["results"])


def test_metadata_describes_server_and_model(protocol: triton.InferenceServerClient) -> None:
    assert protocol.is_server_live()
    assert protocol.is_server_ready()
    assert protocol.is_model_ready(MODEL)
    assert protocol.is_model_ready(MODEL, "1")
    assert not protocol.is_model_ready("another")
    assert "binary_tensor_data" in protocol.get_server_metadata()["extensions"]
    metadata = protocol.get_model_metadata(MODEL)
    assert metadata["versions"] == ["1"]
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["text", "input_ids", "lengths"]
    assert metadata["outputs"][1] == {
        "name": "scores",
        "datatype": "FP32",
        "shape": [-1, len(tiny_models.LABELS)],
    }


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_texts_get_infer_answers(
    protocol: triton.InferenceServerClient,
    client: httpx.Client,
    binary_in: bool,
    binary_out: bool,
) -> None:
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary_out)
        for name in ("scores", "label", "tokens_used")
    ]
    result = protocol.infer(
        MODEL, [texts(TEXTS, binary=binary_in)], outputs=wanted, request_id="seven"
    )
    expected = answers(client, {"texts": TEXTS})
    assert result.get_response()["id"] == "seven"
    assert result.get_response()["parameters"] == {
        "policy": "exact",
        "bundle": expected[0]["bundle"],
    }
    labels = result.as_numpy("label").tolist()
    # The client returns bytes for binary tensors and text for tensors in JSON.
    labels = [label.decode() if binary_out else label for label in labels]
    assert labels == [e["label"] for e in expected]
    assert result.as_numpy("tokens_used").tolist() == [e["tokens_used"] for e in expected]
    scores = result.as_numpy("scores")
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [list(e["scores"].values()) for e in expected], atol=1e-6)
    assert result.as_numpy("tokens_total") is None


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("datatype", ["INT64", "INT32"])
def test_padded_ids_get_infer_answers(
    protocol: triton.InferenceServerClient, client: httpx.Client, binary: bool, datatype: str
) -> None:
    rows = [[5, 6, 7], [9], [1, 2]]
    padded = np.zeros((3, 3), dtype=datatype.lower())
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    tokens = triton.InferInput("input_ids", padded.shape, datatype)
    tokens.set_data_from_numpy(padded, binary_data=binary)
    lengths = triton.InferInput("lengths", [3], "INT64")
    lengths.set_data_from_numpy(np.array([3, 1, 2]), binary_data=binary)
    result = protocol.infer(MODEL, [tokens, lengths], model_version="1")
    expected = answers(client, {"input_ids": rows})
    assert result.as_numpy("tokens_total").tolist() == [3, 1, 2]
    scores = [list(e["scores"].values()) for e in expected]
    np.testing.assert_allclose(result.as_numpy("scores"), scores, atol=1e-6)


def test_concurrent_mixed_lengths_get_own_answers(server: str, client: httpx.Client) -> None:
    documents = ["x" * n for n in (1, 900, 17, 4000, 3, 260)] * 4
    with triton.InferenceServerClient(urlsplit(server).netloc, concurrency=8) as protocol:
        pending = [protocol.async_infer(MODEL, [texts([d], binary=True)]) for d in documents]
        results = [request.get_result().as_numpy("scores")[0] for request in pending]
    expected = [list(e["scores"].values()) for e in answers(client, {"texts": documents})]
    np.testing.assert_allclose(results, expected, atol=1e-5)


def test_errors_reach_client(protocol: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="There is no model 'another'"):
        protocol.infer("another", [texts(["a"], binary=True)])
    with pytest.raises(
        InferenceServerException, match="Expected outputs of the model, got 'logit'"
    ):
        protocol.infer(
            MODEL, [texts(["a"], binary=True)], outputs=[triton.InferRequestedOutput("logit")]
        )
    bad = triton.InferInput("input_ids", [1, 1], "INT64")
    bad.set_data_from_numpy(np.array([[10**6]]))
    with pytest.raises(InferenceServerException, match="outside the vocabulary") as raised:
        protocol.infer(MODEL, [bad])
    assert raised.value.status() == "422"
