"""Answers of a server against PyTorch, and against its own answers to other forms."""

import math
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
TEXTS = ["a", "An invoice.", "Zwei Verträge: 契約 ✉ \x00\n", "long " * 900, "Ω" * 257]


def infer(client: httpx.Client, **body: object) -> Any:
    answer = client.post("/infer", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(text: str) -> list[int]:
    return list(tiny_models.byte_tokenizer().encode(text).ids)


def assert_scores(result: dict[str, Any], expected: dict[str, float]) -> None:
    assert list(result["scores"]) == list(expected)
    for label, score in expected.items():
        assert abs(result["scores"][label] - score) <= BOUND


def scores_by_torch(model: DocumentClassifier, ids: list[int]) -> dict[str, float]:
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), torch.tensor([len(ids)]))
    return dict(zip(tiny_models.LABELS, logits[0].double().softmax(0).tolist(), strict=True))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_gets_pytorch_answer(
    text: str, client: httpx.Client, classifier: DocumentClassifier
) -> None:
    result, ids = infer(client, text=text), tokens_of(text)
    assert result.keys() == {
        "bundle", "label", "scores", "tokens_total", "tokens_used", "truncated", "policy",
        "timings",
    }  # fmt: skip
    assert_scores(result, scores_by_torch(classifier, ids))
    assert result["label"] == max(result["scores"], key=result["scores"].get)
    assert math.isclose(sum(result["scores"].values()), 1, abs_tol=1e-9)
    assert result["tokens_total"] == result["tokens_used"] == len(ids)
    assert result["truncated"] is False
    assert all(seconds >= 0 for seconds in result["timings"].values())


def test_texts_always_get_list(client: httpx.Client) -> None:
    one = infer(client, texts=["An invoice."])
    assert one.keys() == {"results"}
    assert len(one["results"]) == 1


@pytest.mark.parametrize("order", [TEXTS, TEXTS[::-1]], ids=["short first", "long first"])
def test_mixed_lengths_keep_single_answers(order: list[str], client: httpx.Client) -> None:
    together = infer(client, texts=order)["results"]
    for text, result in zip(order, together, strict=True):
        alone = infer(client, text=text)
        assert result["tokens_used"] == alone["tokens_used"]
        assert_scores(result, alone["scores"])


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


def test_health_and_readiness_answer(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz"):
        answer = client.get(path)
        assert answer.status_code == 200
        assert answer.json()["status"]


def test_openapi_describes_endpoints(client: httpx.Client) -> None:
    described = client.get("/openapi.json").json()
    assert {"/infer", "/healthz", "/readyz"} <= described["paths"].keys()
    post = described["paths"]["/infer"]["post"]
    assert {"200", "413", "422"} <= post["responses"].keys()
    assert post["requestBody"]["required"]
