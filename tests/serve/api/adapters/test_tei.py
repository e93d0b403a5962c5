"""The format of text-embeddings-inference, by the requests of its documentation and hub client."""

import math
from typing import Any

import httpx
import numpy as np
import pytest
from huggingface_hub import InferenceClient
from served_heads import ANSWERS, TEXTS, TOPICS, infer


def ranked(scores: dict[str, float]) -> list[dict[str, Any]]:
    rows = [{"score": score, "label": label} for label, score in scores.items()]
    return sorted(rows, key=lambda row: -row["score"])


def predict(client: httpx.Client, output: str, **body: Any) -> Any:
    answer = client.post("/predict", params={"output": output}, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("inputs", [TEXTS[0], [TEXTS[0]]])
def test_single_text_gets_flat_infer_answer(inputs: Any, client: httpx.Client) -> None:
    answer = client.post("/predict", json={"inputs": inputs, "truncate": True}).json()
    assert answer == ranked(client.post("/infer", json={"text": TEXTS[0]}).json()["scores"])


def test_raw_scores_are_logits(heads_client: httpx.Client) -> None:
    scores = {one["label"]: one["score"] for one in predict(heads_client, "topic", inputs="a")}
    raw = predict(heads_client, "topic", inputs="a", raw_scores=True)
    assert [one["score"] for one in raw] == sorted((one["score"] for one in raw), reverse=True)
    total = sum(math.exp(one["score"]) for one in raw)
    softmax = {one["label"]: math.exp(one["score"]) / total for one in raw}
    assert softmax == pytest.approx(scores, abs=1e-12)
    assert softmax.keys() == set(TOPICS)
    (logit,) = predict(heads_client, "paid", inputs="a", raw_scores=True)
    assert logit["label"] == ANSWERS[1]
    sigmoid = 1 / (1 + math.exp(-logit["score"]))
    score = dict(infer(heads_client, "a")[0]["paid"]["scores"])[ANSWERS[1]]
    assert sigmoid == pytest.approx(score, abs=1e-12)


def test_vectors_are_normalized_by_default(heads_client: httpx.Client) -> None:
    expected = [heads["embedding"]["vector"] for heads in infer(heads_client, *TEXTS)]
    plain = heads_client.post("/embed", json={"inputs": TEXTS, "normalize": False}).json()
    for one, other in zip(plain, expected, strict=True):
        assert np.linalg.norm(one) > 2
        np.testing.assert_allclose(one / np.linalg.norm(one), other, rtol=1e-12)


def test_hub_client_reads_embeddings(heads_server: str, heads_client: httpx.Client) -> None:
    client = InferenceClient(f"{heads_server}/embed", token="none")
    found = client.feature_extraction(TEXTS[0])
    (expected,) = infer(heads_client, TEXTS[0])
    np.testing.assert_array_equal(found, np.float32([expected["embedding"]["vector"]]))


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("/predict", {"inputs": ["a", "b"]}, 422, "validation", "takes one text, got a pair"),
        ("/predict", {"inputs": [["a"], ["b", "c"]]}, 422, "validation", "document 1: This model"),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "validation", "inputs.0 must have one"),
        ("/predict", {"inputs": [["a"], "b"]}, 422, "validation", "inputs.1 must be a list"),
        ("/predict", {"inputs": [["a"], {}]}, 422, "validation", "token ids, got an object"),
        ("/predict", {"inputs": []}, 422, "validation", "got an empty array"),
        ("/predict", {"inputs": [["a"]] * 5}, 413, "validation", "at most 4 documents"),
        ("/predict", {"inputs": "a" * 2001}, 413, "validation", "at most 2000 tokens"),
        ("/embed", {"inputs": ["a"] * 5}, 413, "validation", "at most 4 documents"),
        ("/embed", {"inputs": "a", "dimensions": 3}, 422, "validation", "dimensions"),
        (
            "/embed",
            {"inputs": "a", "prompt": "b"},
            422,
            "validation",
            "Expected a known field, got 'prompt'",
        ),
    ],
)
def test_refusals_have_format_of_tei(
    path: str, body: Any, status: int, kind: str, message: str, heads_client: httpx.Client
) -> None:
    params = {"output": "topic"} if path == "/predict" else None
    answer = heads_client.post(path, params=params, json=body)
    error = answer.json()
    assert (answer.status_code, error["error_type"]) == (status, kind), error
    assert message in error["error"]
    assert len(error) == 2


def test_other_models_are_refused(client: httpx.Client, heads_client: httpx.Client) -> None:
    answer = client.post("/embed", json={"inputs": "a"})
    assert (answer.status_code, answer.json()["error_type"]) == (424, "backend")
    assert "Expected an embedding model" in answer.json()["error"]
    for output in ("age", "tags"):
        answer = heads_client.post("/predict", params={"output": output}, json={"inputs": "a"})
        assert "Expected an output of topic, paid, flags" in answer.json()["error"]
    late = {"Deadline-Seconds": "1e-9"}
    answer = client.post("/predict", json={"inputs": "a"}, headers=late)
    assert (answer.status_code, answer.json()["error_type"]) == (504, "overloaded")
