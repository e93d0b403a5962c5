"""Checks of a request before its tensors are read, and the outputs of a response."""

import math
from pathlib import Path
from typing import Any

import input_models
import pytest
from served_heads import TAGGER, answer_of
from starlette.responses import Response

from aftexport.bundle.bundle import Bundle
from aftexport.errors import InputError
from aftserve.api.document_answers import PartsResponse
from aftserve.api.open_inference import columns, messages
from aftserve.api.open_inference.columns import OutputNames
from aftserve.api.open_inference.descriptions import model_config
from aftserve.api.open_inference.messages import Message, parse
from aftserve.api.open_inference.schemas import InferenceRequest, ModelMetadata
from aftserve.model.documents import DocumentAnswer, TokenAnswers


def tensor(name: str, datatype: str, *values: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [*shape], "data": [*values]}


TENSORS = {
    "text": tensor("text", "BYTES", "ab", shape=(1,)),
    "static": tensor("static", "FP32", 0, 0, 0, 0, shape=(1, input_models.WIDTH)),
    "region": tensor("region", "INT64", 1, shape=(1,)),
    "flags": tensor("flags", "INT64", 0, 1, shape=(1, 2)),
    "token_type_ids": tensor("token_type_ids", "INT64", 0, 1, shape=(1, 2)),
}


def read(inputs: list[dict[str, Any]], bundle: Path) -> Message:
    return parse(
        {"inputs": inputs},
        memoryview(b""),
        max_documents=8,
        manifest=Bundle.open(bundle).manifest,
        outputs=[],
    )


def test_extra_tensors_belong_to_documents(extra_bundle: Path) -> None:
    message = read([*TENSORS.values()], extra_bundle)
    assert message.documents == ["ab"]
    assert message.given[0]["token_type_ids"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("inputs", "got"),
    [
        ([*TENSORS.values(), TENSORS["static"]], ", static, .*, static"),
        ([*TENSORS.values(), TENSORS["text"]], "text, .*, text"),
        ([TENSORS["text"], TENSORS["region"] | {"name": "regoin"}], "text, regoin"),
    ],
    ids=["extra input twice", "text twice", "wrong name"],
)
def test_unexpected_names_are_refused(
    inputs: list[dict[str, Any]], got: str, extra_bundle: Path
) -> None:
    known = "static, region, flags, token_type_ids"
    with pytest.raises(InputError, match=f"each once, and beside them {known}, got .*{got}"):
        read(inputs, extra_bundle)


BINARY = InferenceRequest.model_validate(
    {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
        "parameters": {"binary_data_output": True},
    }
)


def respond(answer: DocumentAnswer) -> Response:
    message = messages.Message(BINARY, ["a"], [{}])
    return messages.respond(message, [answer], name="m", version="1", deadline=math.inf)


def test_names_are_made_once_per_bundle(
    bundle_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, calls = Bundle.open(bundle_folder).manifest, []
    outputs_of = columns.outputs_of
    monkeypatch.setattr(columns, "outputs_of", lambda m: (calls.append(m), outputs_of(m))[1])
    names, other = OutputNames(), manifest.model_copy(update={"calibration": None})
    assert names.of(manifest) == ("label", "scores", "tokens_total", "tokens_used")
    assert names.of(manifest) == names.of(other) == names.of(other)
    assert calls == [manifest, other]


def test_only_rows_of_tokens_are_sent_in_parts() -> None:
    rows = answer_of(TAGGER, 9)
    assert isinstance(respond(rows), PartsResponse)
    result = rows.result.model_copy(update={"heads": {}})
    response = respond(DocumentAnswer(result, TokenAnswers({}, {}, 0, None, None)))
    assert not isinstance(response, PartsResponse)
    assert int(response.headers["content-length"]) == len(response.body)
    size = int(response.headers[messages.HEADER_LENGTH])
    assert response.body[size:] == b"\t\0\0\0\0\0\0\0" * 2


@pytest.mark.parametrize(("is_on_gpu", "kind"), [(True, "KIND_GPU"), (False, "KIND_CPU")])
def test_kind_names_device_of_engine(is_on_gpu: bool, kind: str) -> None:
    """ONNX Runtime runs on either device."""
    metadata = ModelMetadata(
        name="model", versions=["1"], platform="onnxruntime_onnx", inputs=[], outputs=[]
    )
    (group,) = model_config(metadata, "onnxruntime", {}, is_on_gpu=is_on_gpu).instance_group
    assert group.kind == kind
