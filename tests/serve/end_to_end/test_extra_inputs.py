"""Extra inputs of documents and tokens: long documents, refusals, and their description."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import input_models
import numpy as np
import pytest
import tiny_models
import torch
from clients import http
from servers import serving

from aftexport.bundle.bundle import Bundle
from aftexport.bundle.manifest import Manifest
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.extra_inputs import ExtraValues, sample_values
from aftexport.pipeline.export import export
from aftserve.client import Client, InvalidRequestError, ServerError
from aftserve.model.classifier import Classifier
from aftserve.model.documents import cut_document
from aftserve.settings import Settings

TEXTS = ["An invoice.", "a", "Pay this by Friday, or the contract ends. " * 9]


@dataclass
class Served:
    """A model with extra inputs, its manifest, and the address of its server."""

    model: torch.nn.Module
    manifest: Manifest
    address: str

    def extras(self, tokens: int, seed: int = 0) -> ExtraValues:
        generator = np.random.default_rng((seed, tokens))
        return sample_values(self.manifest.extra_inputs, generator, tokens)

    def fields(self, text: str, seed: int = 0) -> dict[str, Any]:
        return self.extras(len(text), seed).to_json()

    def expected(self, text: str, seed: int = 0) -> dict[str, float]:
        """Compute the scores by PyTorch in float64."""
        given = {n: torch.from_numpy(x) for n, x in self.extras(len(text), seed).batch().items()}
        given["static"] = given["static"].double()
        ids = torch.tensor([list(text.encode())])
        with torch.inference_mode():
            logits = self.model(ids, lengths=torch.tensor([ids.shape[1]]), **given)[0]
        return dict(zip(tiny_models.LABELS, logits.softmax(0).tolist(), strict=True))

    def post(self, content: Any, **options: Any) -> httpx.Response:
        return http.post(f"{self.address}/infer", json=content, timeout=60, **options)


@pytest.fixture(scope="module")
def served(extra_bundle: Path, extra_server: str) -> Served:
    model = input_models.Events().double().eval()
    return Served(model, Bundle.open(extra_bundle).manifest, extra_server)


def test_long_document_runs_in_chunks(served: Served) -> None:
    whole = http.get(f"{served.address}/info").json()["limits"]["whole_tokens"]
    text = "".join(chr(97 + i % 26) for i in range(4097))
    assert whole < len(text)
    answer = served.post({"text": text, "inputs": served.fields(text)}).json()
    assert answer["tokens_used"] == len(text)
    assert answer["scores"] == pytest.approx(served.expected(text), abs=1e-4)


def tensors(served: Served) -> list[dict[str, Any]]:
    """Return the tensors of all texts as padded ids."""
    longest = max(map(len, TEXTS))
    arrays = {
        "input_ids": np.zeros((len(TEXTS), longest), "<i8"),
        "lengths": np.array([len(text) for text in TEXTS], "<i8"),
        "token_type_ids": np.zeros((len(TEXTS), longest), "<i4"),
    }
    extras = [served.extras(len(text)) for text in TEXTS]
    for name in ("static", "region", "flags"):
        arrays[name] = np.stack([one.document[name] for one in extras])
    types = {"<i8": "INT64", "<i4": "INT32", "<f4": "FP32"}
    return [
        {"name": n, "shape": [*x.shape], "datatype": types[x.dtype.str], "data": x.tolist()}
        for n, x in arrays.items()
    ]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("static", None, "needs the input 'static', FP32 [3, 4], got none"),
        ("static", {"datatype": "INT64"}, "'static' must be FP32 [3, 4], got INT64 [3, 4]"),
        ("static", {"shape": [4, 3]}, "'static' must be FP32 [3, 4], got FP32 [4, 3]"),
        ("token_type_ids", {"shape": [3]}, "must be INT64 [3, tokens], got INT32 [3]"),
        ("region", {"data": [0, 1, 5]}, "'region': expected integers from 0 to 4, got 5"),
        ("input_ids", {"datatype": "FP32"}, "'input_ids' must be integers"),
        ("lengths", {"datatype": "FP32"}, "'lengths' must be integers"),
    ],
)
def test_bad_tensors_are_refused(
    served: Served, name: str, changes: dict[str, Any] | None, said: str
) -> None:
    inputs = tensors(served)
    if changes is None:
        inputs = [one for one in inputs if one["name"] != name]
    else:
        inputs = [one | changes if one["name"] == name else one for one in inputs]
    url = f"{served.address}/v2/models/model/infer"
    response = http.post(url, json={"inputs": inputs}, timeout=60)
    assert response.status_code == 422
    assert said in response.json()["error"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"static": None},
            "document 0: expected the input 'static', a list of 4 numbers, got none",
        ),
        ({"static": [1, 2, 3]}, "'static': expected a list of 4 numbers, got a list of 3 numbers"),
        ({"static": [1, 2, 3, 1e39]}, "'static': expected finite float32 numbers"),
        ({"region": 5}, "'region': expected integers from 0 to 4, got 5"),
        ({"token_type_ids": [0]}, "expected a list of 11 numbers, got a list of 1 numbers"),
        ({"other": 1}, "expected the inputs of the model, static, region"),
    ],
)
def test_bad_values_are_refused(served: Served, changes: dict[str, Any], said: str) -> None:
    response = served.post({"text": TEXTS[0], "inputs": served.fields(TEXTS[0]) | changes})
    assert response.status_code == 422
    assert said in response.json()["detail"].replace("Expected", "expected", 1)


def test_inputs_must_match_the_form(served: Served) -> None:
    fields = served.fields(TEXTS[0])
    for content, said in (
        ({"text": TEXTS[0], "inputs": [fields]}, "give inputs as an object with text"),
        ({"texts": TEXTS[:1], "inputs": fields}, "else as a list of objects"),
        ({"texts": TEXTS, "inputs": [fields]}, "expected inputs for each of 3 documents, got 1"),
    ):
        response = served.post(content)
        assert response.status_code == 422
        assert said in response.json()["detail"]


def test_plain_text_has_no_place_for_inputs(served: Served) -> None:
    for kind in ("text/plain", "application/octet-stream", "application/x-npy"):
        response = http.post(
            f"{served.address}/infer", content=b"abc", headers={"Content-Type": kind}
        )
        assert response.status_code == 422
        said = f"JSON with the inputs static, region, flags, token_type_ids, got {kind}"
        assert said in response.json()["detail"]


def test_client_names_wrong_inputs(served: Served) -> None:
    fields = [served.fields(text, seed) for seed, text in enumerate(TEXTS)]
    batches = [served.extras(len(text), seed).batch() for seed, text in enumerate(TEXTS)]
    with Client(served.address) as client:
        found = client.infer_each(TEXTS, inputs=batches, batch_size=2)
        assert all(isinstance(one, ServerError) for one in found)  # batches of 1, not documents
        with pytest.raises(InvalidRequestError, match="'static'"):
            client.infer(TEXTS[0])
        with pytest.raises(ValueError, match="got fewer"):
            list(client.infer_each(TEXTS, inputs=fields[:1]))
        with pytest.raises(ValueError, match="got more"):
            list(client.infer_each(TEXTS[:1], inputs=fields))


def test_parity_compares_with_same_inputs(served: Served) -> None:
    content = {"text": TEXTS[0], "inputs": served.fields(TEXTS[0])}
    check = http.post(f"{served.address}/parity", json=content, timeout=120).json()
    assert check.get("within"), check
    assert check["error"] < 1e-5


def test_info_and_openapi_describe_inputs(served: Served) -> None:
    info = http.get(f"{served.address}/info").json()
    assert info["extra_inputs"] == [one.model_dump() for one in served.manifest.extra_inputs]
    schemas = http.get(f"{served.address}/openapi.json").json()["components"]["schemas"]
    single = schemas["InferRequest"]["oneOf"][0]
    assert single["required"] == ["text", "inputs"]
    assert single["properties"]["inputs"]["properties"]["region"] == {
        "type": "integer", "minimum": 0, "maximum": 4,
    }  # fmt: skip


def test_model_without_extra_inputs_refuses_them(client: httpx.Client) -> None:
    response = client.post("/infer", json={"text": "abc", "inputs": {"static": [1]}})
    assert response.status_code == 422
    assert "inputs of the model, none, got 'static'" in response.json()["detail"]
    assert client.post("/infer", json={"text": "abc", "inputs": {}}).status_code == 200


def test_head_policy_cuts_token_inputs(extra_bundle: Path) -> None:
    """The server sees the first or last tokens, with their own integers."""
    for policy, expected in (("head", [0, 1, 2]), ("tail", [3, 4, 5])):
        settings = Settings.read([str(extra_bundle), "--long-documents", policy])
        classifier = Classifier(
            Bundle.open(extra_bundle),
            OnnxRuntimeEngine(extra_bundle / "model.onnx"),
            max_tokens=3,
            policy=settings.long_documents,
        )
        types = [0, 1, 2, 3, 4, 5]
        fields = {"static": [0] * 4, "region": 1, "flags": [0, 0], "token_type_ids": types}
        extras = classifier.check_extras(fields, 6)
        one = cut_document(classifier, "abcdef", np.arange(6), None, extras)
        assert one.extras.tokens["token_type_ids"].tolist() == expected
        assert one.extras.document["region"] == 1


def test_features_are_served_with_inputs(tmp_path: Path) -> None:
    inputs = {"static": "vector:4", "types": "token_category"}
    bundle = export(factory="input_models:Track", inputs=inputs, out=tmp_path / "b")
    generator = np.random.default_rng(0)
    extras = sample_values(bundle.manifest.extra_inputs, generator, 5)
    features = generator.standard_normal((5, 3), np.float32)
    given = {n: torch.from_numpy(x) for n, x in extras.batch().items()}
    with torch.inference_mode():
        logits = input_models.Track()(torch.from_numpy(features)[None], torch.tensor([5]), **given)
    with serving(bundle.path, tmp_path / "log") as (address, _), Client(address) as client:
        result = client.infer(features=features, inputs=extras.to_json())
        with pytest.raises(
            InvalidRequestError,
            match="Expected JSON with the inputs static, types, got application",
        ):
            client.infer(features=features)
    assert result.scores is not None
    np.testing.assert_allclose(list(result.scores.values()), logits[0].softmax(0), atol=1e-5)
