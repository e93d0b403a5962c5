"""Models of features and of extra inputs, for which the formats have no field."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import serving
from tiny_models import LABELS

KIND = {"type": "choice", "instructions": "Which?", "choices": [{"value": one} for one in LABELS]}
MOOD = {
    "type": "choice",
    "instructions": "Which?",
    "choices": [{"value": "calm"}, {"value": "sad"}],
}


def bodies(document: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of every format for a document."""
    decision = {"model": "model", "input": document}
    return [
        ("/classify", {"input": document}),
        ("/v1/classify", {"input": [document]}),
        ("/predict", {"inputs": document}),
        ("/v1/decisions", decision | {"questions": [KIND]}),
        ("/v1/decisions", decision | {"questions": [MOOD]}),
    ]


@pytest.mark.parametrize(
    ("name", "documents", "message"),
    [
        ("feature_bundle", ["a text", [5, 6, 7]], "features"),
        ("extra_bundle", ["a text", [5, 6, 7]], "extra_inputs of GET /info"),
    ],
)
def test_every_format_refuses_documents(
    name: str,
    documents: list[Any],
    message: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    bundle = request.getfixturevalue(name)
    with (
        serving(bundle, tmp_path / "log") as (address, _),
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        for path, body in [one for document in documents for one in bodies(document)]:
            answer = client.post(path, json=body)
            assert (answer.status_code, message in answer.text) == (422, True), (path, answer.text)
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for model, field in (
        ("ClassificationRequest", "input"),
        ("PredictRequest", "inputs"),
        ("EmbedRequest", "inputs"),
        ("DecisionRequest", "input"),
    ):
        assert schemas[model]["properties"][field] == {"not": {}}
    assert "Traceback" not in (tmp_path / "log").read_text("utf-8")
