"""The addresses of KServe's first protocol and of SageMaker, by the requests of these platforms."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from clients import http
from servers import serving

JSON = {"Content-Type": "application/json"}
PREDICT = "/v1/models/model:predict"
TEXTS = ["An invoice of ten", "a letter"]


def kserve(client: httpx.Client, path: str = PREDICT, **body: Any) -> httpx.Response:
    """Send a request as KServe's router does."""
    headers = JSON | {"Accept": "*/*", "X-Request-ID": "5b1f"}
    return client.post(path, content=json.dumps(body), headers=headers)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two answers; documents that share a run differ in the last bits of their scores."""
    assert found.keys() == expected.keys()
    for name in found.keys() - {"timings"}:
        assert found[name] == pytest.approx(expected[name], abs=1e-6), name


def test_instances_take_every_form(client: httpx.Client) -> None:
    ids = [[5, 6, 7], [8, 9]]
    texts = client.post("/infer", json={"texts": TEXTS}).json()["results"]
    numbers = client.post("/infer", json={"input_ids": ids}).json()["results"]
    mixed, objects = [TEXTS[0], ids[1]], [{"text": TEXTS[0]}, {"input_ids": ids[1]}]
    both = [texts[0], numbers[1]]
    for instances, expected in ((TEXTS, texts), (ids, numbers), (mixed, both), (objects, both)):
        answer = kserve(client, instances=instances)
        assert answer.status_code == 200, answer.text
        assert answer.json().keys() == {"predictions"}
        for found, one in zip(answer.json()["predictions"], expected, strict=True):
            assert_same(found, one)
        assert answer.headers["server-timing"].startswith("tokenize;dur=")


def test_instances_of_features_are_answered(feature_server: str) -> None:
    rows = np.random.default_rng(0).standard_normal((70, 4)).tolist()
    (expected,) = http.post(f"{feature_server}/infer", json={"input_features": [rows]}).json()[
        "results"
    ]
    for instance in (rows, {"input_features": rows}):
        answer = http.post(f"{feature_server}{PREDICT}", json={"instances": [instance]})
        (found,) = answer.json()["predictions"]
        assert_same(found, expected)


def test_predict_takes_options_of_infer(client: httpx.Client) -> None:
    query = "evidence=2&explain=invoice"
    answer = kserve(client, f"{PREDICT}?{query}", instances=TEXTS[:1])
    expected = client.post(f"/infer?{query}", json={"text": TEXTS[0]}).json()
    assert answer.json()["predictions"][0]["explained"] == expected["explained"]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (PREDICT, {"instances": []}, 422, "must have a document"),
        (PREDICT, {"instances": [1, 2]}, 422, "instances.0 must be a text, token ids"),
        (PREDICT, {"instances": [1] * 99}, 422, "got a number. Put the ids of each document"),
        (PREDICT, {"instances": [True]}, 422, "got a boolean"),
        (PREDICT, {"instances": ["a", {"text": 3}]}, 422, "instances.1.text: "),
        (PREDICT, {"instances": [{"texts": ["a"]}]}, 422, "instances.0.texts: "),
        (PREDICT, {"instances": "a"}, 422, "instances: "),
        (PREDICT, {"instances": ["a"] * 3000}, 413, "at most 256 entries"),
        (PREDICT, {"inputs": ["a"]}, 422, "Fields are instances."),
        (PREDICT, {"instances": ["a"], "evidence": 3}, 422, "?evidence=3"),
        (f"{PREDICT}?evidense=3", {"instances": ["a"]}, 422, "Write evidence."),
        ("/v1/models/other:predict", {"instances": ["a"]}, 404, "'other'"),
    ],
)
def test_predict_refuses_in_its_format(
    path: str, body: dict[str, Any], status: int, said: str, client: httpx.Client
) -> None:
    answer = kserve(client, path, **body)
    assert (answer.status_code, [*answer.json()]) == (status, ["error"])
    assert said in answer.json()["error"]


def test_model_tells_kserve_its_readiness(client: httpx.Client) -> None:
    found = client.get("/v1/models/model").json()
    assert (found["name"], found["ready"]) == ("model", True)
    assert client.get("/v1/models/other").status_code == 404


def test_invocations_answer_as_infer(client: httpx.Client) -> None:
    headers = JSON | {"X-Amzn-SageMaker-Custom-Attributes": "trace", "Accept": "application/json"}
    for content, kind in (
        (json.dumps({"text": TEXTS[0]}), "application/json"),
        (json.dumps({"texts": TEXTS}), "application/json; charset=utf-8"),
        (TEXTS[0], "text/plain"),
        ('{"text": "a"}\n{"text": "b"}', "application/jsonlines"),
        ('{"text": 3}', "application/json"),
        ("a,b", "text/csv"),
    ):
        here, there = (
            client.post(path, content=content, headers=headers | {"Content-Type": kind})
            for path in ("/invocations", "/infer")
        )
        assert here.status_code == there.status_code
        assert here.headers["content-type"] == there.headers["content-type"]
        lines = [map(json.loads, one.text.splitlines()) for one in (here, there)]
        for found, expected in zip(*lines, strict=True):
            parts = [one.get("results", [one]) for one in (found, expected)]
            for one, other in zip(*parts, strict=True):
                assert_same(one, other)


def test_invocations_keep_deadline_and_query(client: httpx.Client) -> None:
    body = json.dumps({"text": "a long document " * 300})
    late = client.post("/invocations", content=body, headers=JSON | {"Deadline-Seconds": "1e-9"})
    assert late.status_code == 504
    answer = client.post("/invocations?evidence=1", content=body, headers=JSON)
    assert answer.json()["evidence"]["logit"]
    assert client.post("/invocations?x=1", content=body, headers=JSON).status_code == 422


def test_container_of_sagemaker_is_served(bundle_folder: Path, tmp_path: Path) -> None:
    """SageMaker starts an image with the word serve, and the model in a folder of its own."""
    log, folder = tmp_path / "log", str(bundle_folder)
    with serving(Path("serve"), log, AFTSERVE_BUNDLES=folder) as (address, _):
        assert http.get(f"{address}/ping").json() == {"status": "ready"}
        assert http.get(f"{address}/ping?verbose=1").status_code == 200
        assert http.post(f"{address}/invocations", json={"text": "a"}).status_code == 200
        lines = 'aftserve_responses_total{model="model",path="/invocations",status="200"} 1.0'
        assert lines in http.get(f"{address}/metrics").text
    text = log.read_text("utf-8")
    assert "Traceback" not in text
    assert "POST /invocations 200" in text
    assert "GET /ping 200" not in text
