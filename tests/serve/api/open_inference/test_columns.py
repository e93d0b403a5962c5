"""The outputs of the protocol: their names, and answers without parts."""

import math
from pathlib import Path

import pytest
from served_heads import TAGGER, answer_of
from starlette.responses import Response

from aftexport.bundle.bundle import Bundle
from aftserve.api.document_answers import PartsResponse
from aftserve.api.open_inference import columns, messages
from aftserve.api.open_inference.columns import OutputNames
from aftserve.api.open_inference.schemas import InferenceRequest
from aftserve.model.documents import DocumentAnswer, TokenAnswers

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
