"""Requests choose the outputs of their answers, and the labels and values with evidence."""

import json
from typing import Any

import numpy as np
import pytest
import several_heads
import tiny_models
import torch
from clients import http
from servers import Serve

import aftexport
from aftexport.pipeline.export import export
from aftserve.client import Client

NAMES = [*several_heads.TASKS]
WHOLE = 60
"""Maximum tokens of a document that runs whole."""
TEXTS = ["Pay this by Friday.", "An invoice of " + "many words, " * 20]
LOGITS = ["topic:class_0", "topic:class_1", "class_2", "label_0", "label_1", "age:value_0"]


@pytest.fixture(scope="module")
def address(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("chosen") / "model.pt"
    tokenizer = tiny_models.byte_tokenizer().to_str()
    aftexport.save(model, model=several_heads.classifier(), tokenizer=tokenizer)
    bundle = export(model)
    plan = bundle.manifest.chunked
    assert plan is not None
    assert plan.evidence
    budget = (WHOLE + 0.5) * plan.token_bytes / (1 << 20)
    return serve(bundle.path, "--memory-budget-mib", str(budget))


def by_pytorch(text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return in float64 all logits, the part of each token ``[6, T]``, and all biases."""
    ids = torch.tensor([tiny_models.byte_tokenizer().encode(text).ids])
    length = torch.tensor([ids.shape[1]])
    model = several_heads.classifier().double()
    with torch.no_grad():
        logits = torch.cat([*model(ids, length).values()], 1)[0]
        x = model.encoder(model.embedding(ids), length)[0]
        weights = torch.cat([head.weight for head in model.heads])
        return logits, weights @ x.T / len(x), torch.cat([head.bias for head in model.heads])


def infer(address: str, text: str, status: int = 200, **query: Any) -> Any:
    response = http.post(f"{address}/infer", params=query, json={"text": text})
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("text", TEXTS, ids=["whole", "in chunks"])
def test_evidence_of_every_logit(address: str, text: str) -> None:
    answer = infer(address, text, evidence=100, explain=LOGITS)
    assert "evidence" not in answer
    logits, added, biases = by_pytorch(text)
    heads = ["topic"] * 3 + ["flags"] * 2 + ["age"]
    for number, found in enumerate(answer["explained"]):
        assert found["head"] == heads[number]
        assert found["name"] == LOGITS[number].rpartition(":")[2]
        assert found["logit"] == pytest.approx(logits[number].item(), abs=1e-4)
        assert found["offset"] == pytest.approx(biases[number].item(), abs=1e-6)
        parts, total = added[number].numpy(), 0.0
        for span in found["spans"]:
            part = parts[span["start_token"] : span["end_token"]].sum()
            assert span["contribution"] == pytest.approx(part, abs=1e-5)
            assert span["text"] == text[span["start"] : span["end"]]
            total += span["above_average"]
        above = np.maximum(parts - parts.mean(), 0).sum()
        assert 0 < total <= above + 1e-5
    assert len(answer["explained"]) == len(LOGITS)


def test_default_is_largest_logit_of_first_head(address: str) -> None:
    for text in TEXTS:
        plain = infer(address, text, evidence=3)
        assert "explained" not in plain
        chosen = infer(address, text, evidence=3, explain="topic")["explained"]
        logits, _, _ = by_pytorch(text)
        assert plain["evidence"]["logit"] == pytest.approx(logits[:3].max().item(), abs=1e-4)
        (one,) = chosen
        assert (one.pop("head"), one["name"]) == ("topic", f"class_{int(logits[:3].argmax())}")
        for field in ("logit", "offset"):
            assert one[field] == pytest.approx(plain["evidence"][field], abs=1e-6)


def test_output_explains_its_answer(address: str) -> None:
    """A multi-label output explains the labels that hold, and a regression each value."""
    for text in TEXTS:
        answer = infer(address, text, explain=["flags", "age"])
        names = [one["name"] for one in answer["explained"]]
        assert names == [*answer["heads"]["flags"]["labels"], "value_0"]
        assert all(len(one["spans"]) <= 5 for one in answer["explained"])


def test_lines_and_client_choose_outputs(address: str) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    kind = {"Content-Type": "application/x-ndjson"}
    query = {"outputs": "flags"}
    response = http.post(f"{address}/infer", params=query, content=lines, headers=kind)
    with Client(address) as client:
        results = client.infer(TEXTS, outputs="flags")
    for line, result in zip(response.text.splitlines(), results, strict=True):
        assert json.loads(line)["heads"].keys() == {"flags"}
        assert result.heads is not None
        assert result.heads.keys() == {"flags"}


def test_zero_passages_of_choice_are_the_default(address: str) -> None:
    for query in ({}, {"evidence": 0}):
        (found,) = infer(address, TEXTS[1], explain="label_0", **query)["explained"]
        assert len(found["spans"]) == 5
    assert "got 'spam'" in infer(address, TEXTS[1], 422, evidence=0, explain="spam")["detail"]


def test_evidence_of_long_documents_is_refused(address: str) -> None:
    """A request holds a number for each token and logit of all its documents."""
    text, query = "word " * (1 << 17), {"explain": [*LOGITS]}
    body = {"texts": [text] * 5}
    response = http.post(f"{address}/infer", params=query, json=body, timeout=60)
    assert response.status_code == 413, response.text
    assert "at most 16777216 numbers" in response.json()["detail"]
    body = {"texts": ["a", "word " * 150_000]}
    response = http.post(f"{address}/infer", params=query, json=body, timeout=60)
    assert response.status_code == 422, response.text
    assert response.json()["detail"].startswith("document 1: Expected at most 5 labels or values")


@pytest.mark.parametrize("outputs", [["age"], ["flags", "topic"]])
def test_outputs_are_those_of_all(address: str, outputs: list[str]) -> None:
    for text in TEXTS:
        every = infer(address, text)["heads"]
        found = infer(address, text, outputs=outputs)["heads"]
        assert [*found] == [name for name in NAMES if name in outputs]
        for name in outputs:
            assert found[name] == every[name]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"explain": "spam"}, "got 'spam'. Choose one that the model has: class_0, class_1"),
        ({"explain": "flags:spam"}, "Choose one that flags has: label_0, label_1."),
        ({"outputs": ["age", "size"]}, "got 'size'. Choose among topic, flags, age."),
        ({"evidence": 1, "outputs": "age"}, "Add outputs=topic"),
        ({"explain": "label_0", "outputs": "age"}, "Add outputs=flags"),
    ],
)
def test_unknown_names_are_refused(address: str, query: dict[str, Any], message: str) -> None:
    assert message in infer(address, TEXTS[0], 422, **query)["detail"]


def test_info_lists_explainable_outputs(address: str) -> None:
    assert http.get(f"{address}/info").json()["explainable"] == NAMES
    parameters = http.get(f"{address}/openapi.json").json()["paths"]["/infer"]["post"]["parameters"]
    schemas = {one["name"]: one["schema"] for one in parameters}
    assert schemas["outputs"]["items"]["enum"] == NAMES
    accepted = {*schemas["explain"]["items"]["enum"]}
    assert {"topic", "class_2", "label_0", "value_0", *LOGITS} <= accepted
    for name in accepted:
        assert infer(address, TEXTS[0], explain=name)["bundle"]


def test_tensors_are_of_requested_heads(address: str) -> None:
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS}]
    body = {"inputs": inputs, "outputs": [{"name": "age.values"}, {"name": "tokens_used"}]}
    response = http.post(f"{address}/v2/models/model/infer", json=body, timeout=60)
    assert response.status_code == 200, response.text
    outputs = {one["name"]: one["data"] for one in response.json()["outputs"]}
    assert outputs.keys() == {"age.values", "tokens_used"}
    expected = [by_pytorch(text)[0][5].item() for text in TEXTS]
    assert outputs["age.values"] == pytest.approx(expected, abs=1e-4)
