"""Triton's own HTTP client, unmodified, against the server."""

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tiny_models
import tritonclient.http as triton
from google.protobuf import json_format
from triton_schema import MODEL_CONFIG
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


@pytest.mark.parametrize("binary", [False, True])
def test_texts_get_infer_answers(
    protocol: triton.InferenceServerClient, client: httpx.Client, binary: bool
) -> None:
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary)
        for name in ("scores", "label", "tokens_used")
    ]
    sent = [texts(TEXTS, binary=not binary)]
    result = protocol.infer(MODEL, sent, outputs=wanted, request_id="seven")
    expected = client.post("/infer", json={"texts": TEXTS}).json()["results"]
    assert result.get_response()["id"] == "seven"
    assert result.get_response()["parameters"] == {
        "policy": "exact",
        "bundle": expected[0]["bundle"],
    }
    labels = result.as_numpy("label").tolist()
    # The client returns bytes for binary tensors and text for tensors in JSON.
    labels = [label.decode() if binary else label for label in labels]
    assert labels == [e["label"] for e in expected]
    assert result.as_numpy("tokens_used").tolist() == [e["tokens_used"] for e in expected]
    scores = result.as_numpy("scores")
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [list(e["scores"].values()) for e in expected], atol=1e-6)
    assert result.as_numpy("tokens_total") is None


@pytest.mark.parametrize("binary", [False, True])
def test_int32_ids_with_lengths_are_read(
    protocol: triton.InferenceServerClient, binary: bool
) -> None:
    tokens = triton.InferInput("input_ids", [3, 3], "INT32")
    ids = np.array([[5, 6, 7], [9, 0, 0], [1, 2, 0]], np.int32)
    tokens.set_data_from_numpy(ids, binary_data=binary)
    lengths = triton.InferInput("lengths", [3], "INT64")
    lengths.set_data_from_numpy(np.array([3, 1, 2]), binary_data=binary)
    result = protocol.infer(MODEL, [tokens, lengths], model_version="1")
    assert result.as_numpy("tokens_total").tolist() == [3, 1, 2]


def test_errors_reach_client(protocol: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="Expected the model 'model', got 'another'"):
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


def test_config_follows_tritons_schema(
    protocol: triton.InferenceServerClient, client: httpx.Client
) -> None:
    config = protocol.get_model_config(MODEL)
    assert config == protocol.get_model_config(MODEL, "1")
    checked = json_format.ParseDict(config, MODEL_CONFIG.ModelConfig())
    assert (checked.name, checked.max_batch_size) == (MODEL, 0)
    assert [*checked.version_policy.specific.versions] == [1]
    assert checked.instance_group[0].kind == MODEL_CONFIG.ModelInstanceGroup.KIND_CPU
    metadata = protocol.get_model_metadata(MODEL)
    for found, tensors in ((checked.input, "inputs"), (checked.output, "outputs")):
        types = {one["name"]: one["datatype"] for one in metadata[tensors]}
        assert {one.name: [*one.dims] for one in found} == {
            one["name"]: one["shape"] for one in metadata[tensors]
        }
        for one in found:
            name = MODEL_CONFIG.DataType.Name(one.data_type).removeprefix("TYPE_")
            assert name == types[one.name].replace("BYTES", "STRING")
    assert [one.name for one in checked.input if one.optional] == ["text", "input_ids", "lengths"]
    info = client.get("/info").json()
    assert checked.parameters["max_tokens"].string_value == str(info["limits"]["max_tokens"])
    assert checked.parameters["bundle"].string_value == info["bundle"]
    with pytest.raises(InferenceServerException, match="got 'another'"):
        protocol.get_model_config("another")


def test_statistics_count_requests(
    protocol: triton.InferenceServerClient, client: httpx.Client
) -> None:
    def read() -> dict[str, Any]:
        (found,) = protocol.get_inference_statistics(MODEL)["model_stats"]
        return dict(found)

    before = read()
    since = time.time()
    protocol.infer(MODEL, [texts(TEXTS, binary=False)])
    timings = client.post("/infer", json={"text": TEXTS[2]}).json()["timings"]
    assert client.post("/infer", json={"text": ""}).status_code == 422  # no inference
    refused = client.post("/infer", json={"text": "a"}, headers={"Deadline-Seconds": "1e-9"})
    assert refused.status_code in (413, 429, 504)
    after = read()
    assert (after["name"], after["version"]) == (MODEL, "1")
    assert after["inference_count"] == before["inference_count"] + 4
    assert after["last_inference"] >= int(1000 * since)
    stages = after["inference_stats"]

    def added(stage: str, field: str) -> int:
        return int(stages[stage][field] - before["inference_stats"][stage][field])

    names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    assert [added(name, "count") for name in names] == [2] * 5
    assert added("fail", "count") == 1
    assert sum(added(name, "ns") for name in names[1:]) == pytest.approx(
        added("success", "ns"), abs=10
    )
    assert added("compute_infer", "ns") >= 1e9 * timings["inference_seconds"] - 1
    runs = {one["batch_size"]: one["compute_infer"] for one in after["batch_stats"]}
    assert after["execution_count"] == sum(one["count"] for one in runs.values())
    assert after["execution_count"] > before["execution_count"]
    documents = sum(size * one["count"] for size, one in runs.items())
    assert documents >= after["inference_count"]
    assert protocol.get_inference_statistics()["model_stats"][0]["name"] == MODEL
    assert {"model_configuration", "statistics"} <= {*protocol.get_server_metadata()["extensions"]}
