"""Reranking in the formats of text-embeddings-inference and of Cohere, with CrossEncoder scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import text_pairs
from text_pairs import PAIRS, PASSAGES, QUERY

TEI = {"query": QUERY, "texts": PASSAGES}
COHERE = {"model": "pairs", "query": QUERY, "documents": PASSAGES}


@pytest.fixture(scope="module")
def reranker(pair_bundle: Path, serve: Any) -> Iterator[httpx.Client]:
    address = serve(pair_bundle, "--max-documents", "5", "--budget-tokens", "1")
    with httpx.Client(base_url=address, timeout=60) as session:
        yield session


@pytest.fixture(scope="module")
def logits(pair_bundle: Path) -> list[float]:
    """The logits of transformers in float64."""
    found: list[float] = text_pairs.logits(pair_bundle.with_name("model"), PAIRS)[:, 0].tolist()
    return found


def post(client: httpx.Client, path: str, body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def sigmoids(logits: list[float]) -> list[float]:
    return [float(1 / (1 + np.exp(-one))) for one in logits]


def test_tei_ranks_are_library_scores(reranker: httpx.Client, logits: list[float]) -> None:
    order = sorted(range(len(logits)), key=lambda index: -logits[index])
    found = post(reranker, "/rerank", TEI | {"truncate": False})
    assert [one["index"] for one in found] == order
    assert all(one.keys() == {"index", "score"} for one in found)
    wanted = sigmoids(logits)
    assert [one["score"] for one in found] == pytest.approx([wanted[i] for i in order], abs=1e-5)
    raw = post(reranker, "/rerank", TEI | {"raw_scores": True, "return_text": True})
    assert [one["score"] for one in raw] == pytest.approx([logits[i] for i in order], abs=1e-4)
    assert [one["text"] for one in raw] == [PASSAGES[i] for i in order]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_cohere_ranks_are_library_scores(
    path: str, reranker: httpx.Client, logits: list[float]
) -> None:
    order = sorted(range(len(logits)), key=lambda index: -logits[index])
    answer = post(reranker, path, COHERE)
    found, wanted = answer["results"], sigmoids(logits)
    assert answer["id"].startswith("rerank-")
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["total_tokens"] > 0
    assert [one["index"] for one in found] == order
    assert all(one.keys() == {"index", "relevance_score"} for one in found)
    scores = [one["relevance_score"] for one in found]
    assert scores == pytest.approx([wanted[i] for i in order], abs=1e-5)
    first = post(reranker, path, COHERE | {"top_n": 2, "return_documents": True})["results"]
    assert [one["document"]["text"] for one in first] == [PASSAGES[i] for i in order[:2]]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/rerank", {"query": "a", "texts": []}, 422, "texts"),
        ("/rerank", {"query": "a", "texts": ["b"] * 6}, 413, "at most 5"),
        ("/rerank", {"query": "a", "texts": ["b " * 60]}, 413, "at most 48 tokens"),
        ("/v2/rerank", {"query": "a", "documents": ["b"] * 6}, 413, "at most 5"),
        ("/v2/rerank", COHERE | {"model": "other"}, 404, "other"),
        ("/v2/rerank", COHERE | {"max_tokens_per_doc": 9}, 422, "max_tokens_per_doc"),
        ("/v2/rerank", COHERE | {"top_n": 0}, 422, "top_n"),
    ],
)
def test_unfit_requests_are_refused(
    path: str, body: Any, status: int, message: str, reranker: httpx.Client
) -> None:
    answer = reranker.post(path, json=body)
    field = "error" if path == "/rerank" else "message"
    assert answer.status_code == status, answer.text
    assert message in answer.json()[field]


def test_other_models_are_refused(heads_client: httpx.Client) -> None:
    answer = heads_client.post("/rerank", json=TEI)
    assert (answer.status_code, answer.json()["error_type"]) == (424, "backend")
    answer = heads_client.post("/v2/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 422
    assert "Expected a model of pairs with one logit" in answer.json()["message"]


def test_schema_has_pairs(reranker: httpx.Client) -> None:
    schemas = reranker.get("/openapi.json").json()["components"]["schemas"]
    (text, ids) = schemas["DocumentRequest"]["oneOf"]
    assert text["required"] == ["text", "text_pair"]
    assert ids["required"] == ["input_ids", "inputs"]
    assert schemas["CohereRerankRequest"]["properties"]["documents"]["items"]["type"] == "string"
