"""Triton's own gRPC client, unmodified, against a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_models
import tritonclient.grpc as triton
import tritonclient.grpc.service_pb2 as official
from clients import eventually, http, metric
from grpc_servers import GrpcServer, serving_grpc
from tritonclient.utils import InferenceServerException

from aftexport.errors import InputError
from aftserve.grpc.wire_types import MESSAGES, parse

MODEL = "model"
TEXTS = ["An invoice.", "Zwei Verträge: 契約 ✉", "long " * 300]


@pytest.fixture(scope="module")
def served(bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    log = tmp_path_factory.mktemp("grpc") / "log"
    with serving_grpc(bundle_folder, log, "--max-body-mib", "0.1") as server:
        yield server
        assert "Traceback" not in log.read_text("utf-8")


@pytest.fixture(scope="module")
def protocol(served: GrpcServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(served.grpc) as client:
        yield client


def tensor(name: str, datatype: str, values: Any) -> triton.InferInput:
    array = np.array(values, dtype=object if datatype == "BYTES" else None)
    made = triton.InferInput(name, array.shape, datatype)
    made.set_data_from_numpy(array)
    return made


def answers(served: GrpcServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    response: httpx.Response = http.post(f"{served.http}/infer", json=body)
    return list(response.json()["results"])


def check_same(result: triton.InferResult, expected: list[dict[str, Any]]) -> None:
    assert [one.decode() for one in result.as_numpy("label")] == [e["label"] for e in expected]
    scores = np.array([[*e["scores"].values()] for e in expected], np.float32)
    assert result.as_numpy("scores").tobytes() == scores.tobytes()
    for name in ("tokens_total", "tokens_used"):
        assert result.as_numpy(name).tolist() == [e[name] for e in expected]


def test_metadata_describes_server_and_model(protocol: triton.InferenceServerClient) -> None:
    assert protocol.is_server_live()
    assert protocol.is_server_ready()
    assert protocol.is_model_ready(MODEL)
    assert protocol.is_model_ready(MODEL, "1")
    assert protocol.get_server_metadata().name == "aftserve"
    metadata = protocol.get_model_metadata(MODEL)
    assert [one.name for one in metadata.inputs] == ["text", "input_ids", "lengths"]
    scores = metadata.outputs[1]
    assert (scores.name, scores.datatype, list(scores.shape)) == (
        "scores",
        "FP32",
        [-1, len(tiny_models.LABELS)],
    )


def test_texts_get_infer_answers(
    served: GrpcServer, protocol: triton.InferenceServerClient
) -> None:
    result = protocol.infer(MODEL, [tensor("text", "BYTES", TEXTS)], request_id="seven")
    expected = answers(served, {"texts": TEXTS})
    check_same(result, expected)
    response = result.get_response()
    assert response.id == "seven"
    assert response.parameters["bundle"].string_param == expected[0]["bundle"]


def test_ids_get_infer_answers(served: GrpcServer, protocol: triton.InferenceServerClient) -> None:
    rows = [[5, 6, 7, 8], [9, 10, 0, 0]]
    inputs = [tensor("input_ids", "INT64", rows), tensor("lengths", "INT64", [4, 2])]
    expected = answers(served, {"input_ids": [[5, 6, 7, 8], [9, 10]]})
    check_same(protocol.infer(MODEL, inputs), expected)
    wanted = [triton.InferRequestedOutput("label")]
    response = protocol.infer(MODEL, inputs, outputs=wanted).get_response()
    assert [one.name for one in response.outputs] == ["label"]


@pytest.mark.parametrize(
    ("model", "inputs", "status", "problem"),
    [
        ("other", [tensor("text", "BYTES", ["a"])], "NOT_FOUND", "got 'other'"),
        (MODEL, [tensor("texts", "BYTES", ["a"])], "INVALID_ARGUMENT", "The inputs must be text"),
        (MODEL, [tensor("text", "BYTES", ["a"] * 257)], "INVALID_ARGUMENT", "at most 256"),
        (MODEL, [tensor("text", "FP64", [1.5])], "INVALID_ARGUMENT", "datatype"),
        (MODEL, [tensor("text", "BYTES", ["a" * (1 << 17)])], "RESOURCE_EXHAUSTED", "larger"),
    ],
    ids=["model", "input", "documents", "datatype", "size"],
)
def test_error_has_status_and_problem(
    model: str,
    inputs: list[triton.InferInput],
    status: str,
    problem: str,
    protocol: triton.InferenceServerClient,
) -> None:
    with pytest.raises(InferenceServerException, match=problem) as raised:
        protocol.infer(model, inputs)
    assert raised.value.status() == f"StatusCode.{status}"


def test_calls_are_counted_and_logged(
    served: GrpcServer, protocol: triton.InferenceServerClient
) -> None:
    labels = {"path": "/inference.GRPCInferenceService/ModelInfer", "status": "OK"}
    text = [tensor("text", "BYTES", ["An invoice."])]
    protocol.infer(MODEL, text)
    before = metric(served.http, "aftserve_responses_total", **labels)
    protocol.infer(MODEL, text, headers={"x-request-id": "named-by-client"})
    eventually(
        lambda: metric(served.http, "aftserve_responses_total", **labels) == before + 1,
        "the call is counted",
    )

    def found() -> list[str]:
        lines = served.log.read_text("utf-8").splitlines(keepends=True)
        return [one for one in lines if "named-by-client" in one and one.endswith("\n")]

    eventually(found, "the call is logged")
    (line,) = found()
    assert "gRPC /inference.GRPCInferenceService/ModelInfer OK" in line
    assert "documents=1" in line


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
