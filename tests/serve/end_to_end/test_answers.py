"""Answers of a server to many clients, and the fields of a plain answer."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_models
import torch

from aftexport.nn import DocumentClassifier
from aftexport.parity import TOLERANCES

BOUND = TOLERANCES["fp32"].bound


def infer(client: httpx.Client, **body: object) -> Any:
    answer = client.post("/infer", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_scores(result: dict[str, Any], expected: dict[str, float]) -> None:
    assert list(result["scores"]) == list(expected)
    for label, score in expected.items():
        assert abs(result["scores"][label] - score) <= BOUND


def scores_by_torch(model: DocumentClassifier, ids: list[int]) -> dict[str, float]:
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), torch.tensor([len(ids)]))
    return dict(zip(tiny_models.LABELS, logits[0].double().softmax(0).tolist(), strict=True))


def test_plain_answers_have_fixed_fields(client: httpx.Client) -> None:
    assert infer(client, text="An invoice.").keys() == {
        "bundle", "label", "scores", "tokens_total", "tokens_used", "truncated", "policy",
        "timings",
    }  # fmt: skip
    outputs = client.get("/v2/models/model").json()["outputs"]
    assert [one["name"] for one in outputs] == ["label", "scores", "tokens_total", "tokens_used"]
    assert client.get("/info").json()["head_calibrations"] is None


@pytest.mark.parametrize("token", [0, tiny_models.VOCABULARY - 1])
def test_first_and_last_ids_are_accepted(token: int, client: httpx.Client) -> None:
    assert infer(client, input_ids=[[token]])["results"][0]["tokens_used"] == 1


def test_concurrent_clients_get_own_answers(server: str, classifier: DocumentClassifier) -> None:
    generator = np.random.default_rng(0)
    documents = [generator.integers(0, 300, length).tolist() for length in range(1, 400, 13)]

    def ask(ids: list[int]) -> Any:
        with httpx.Client(base_url=server, timeout=60) as client:
            return infer(client, input_ids=[ids])["results"][0]

    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(ask, documents))
    for ids, result in zip(documents, results, strict=True):
        assert result["tokens_used"] == len(ids)
        assert_scores(result, scores_by_torch(classifier, ids))
