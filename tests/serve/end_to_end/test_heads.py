"""Every kind of head is served as PyTorch computes it, over every interface."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from clients import http
from sampling import part_of
from servers import serving

import aftexport
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export
from aftserve.client import Client

NAMES = {
    "multi_label_classification": ["urgent", "legal", "spam"],
    "binary_classification": ["ham", "spam"],
    "regression": ["age", "mass"],
}
TEXTS = ["An invoice.", "a", "Pay this by Friday, or the contract ends. " * 9]


class Served:
    """A model with a head, and the address of its server."""

    def __init__(self, task: str, model: DocumentClassifier, address: str) -> None:
        self.task, self.model, self.address = task, model.double(), address
        self.names = NAMES[task]

    def expected(self, text: str) -> dict[str, float]:
        """Compute the numbers of an answer by PyTorch in float64."""
        ids = torch.tensor([tiny_models.byte_tokenizer().encode(text).ids])
        with torch.inference_mode():
            logits = self.model(ids, torch.tensor([ids.shape[1]]))[0]
        if self.task == "regression":
            numbers = logits * torch.tensor([12.5, 1.0]) + torch.tensor([40.0, 0.0])
        elif self.task == "binary_classification":
            numbers = torch.cat([-logits, logits]).sigmoid()
        else:
            numbers = logits.sigmoid()
        return dict(zip(self.names, numbers.tolist(), strict=True))


@pytest.fixture(scope="module", params=part_of([*NAMES], lambda task: (task, {None}), keep=0.5))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    task, folder = request.param, tmp_path_factory.mktemp(request.param)
    width = 1 if task == "binary_classification" else len(NAMES[task])
    torch.manual_seed(11)
    settings = tiny_models.CONFIG | {"num_labels": width, "problem_type": task}
    model = DocumentClassifier(ClassifierConfig(**settings)).eval()
    with torch.no_grad():
        model.head.weight.mul_(9)
    tokenizer = tiny_models.byte_tokenizer().to_str()
    aftexport.save(folder / "model.pt", model=model, labels=NAMES[task], tokenizer=tokenizer)
    heads = None
    if task == "regression":
        age = {"name": "age", "unit": "years", "scale": 12.5, "offset": 40.0}
        heads = folder / "heads.json"
        heads.write_text(json.dumps({"logits": {"task": task, "values": [age, {"name": "mass"}]}}))
    bundle = export(folder / "model.pt", heads=heads)
    options = ("--reference", str(folder / "model.pt"))
    with serving(bundle.path, folder / "log", *options) as (address, _):
        yield Served(task, model, address)


def numbers_of(answer: Any) -> dict[str, float]:
    """Take the numbers of an answer, and check its decision."""
    if "label" in answer:
        assert answer["label"] == max(answer["scores"], key=answer["scores"].get)
        return dict(answer["scores"])
    (head,) = answer["heads"].values()
    if "values" in head:
        return dict(head["values"])
    assert head["labels"] == [name for name, score in head["scores"].items() if score >= 0.5]
    return dict(head["scores"])


def test_answers_are_those_of_pytorch(served: Served) -> None:
    results = http.post(f"{served.address}/infer", json={"texts": TEXTS}).json()["results"]
    for text, answer in zip(TEXTS, results, strict=True):
        assert numbers_of(answer) == pytest.approx(served.expected(text), rel=1e-4, abs=1e-5)
        assert ("label" in answer) == (served.task == "binary_classification")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    streamed = http.post(
        f"{served.address}/infer",
        content=lines,
        headers={"Content-Type": "application/x-ndjson"},
    ).text.splitlines()
    for line, answer in zip(streamed, results, strict=True):
        assert numbers_of(json.loads(line)) == pytest.approx(numbers_of(answer), abs=1e-6)


def test_tensors_are_those_of_json(served: Served) -> None:
    known = http.get(f"{served.address}/v2/models/model").json()["outputs"]
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}]
    answer = http.post(f"{served.address}/v2/models/model/infer", json={"inputs": inputs})
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    assert list(outputs) == [output["name"] for output in known]
    for output in known:
        assert outputs[output["name"]]["datatype"] == output["datatype"]
        assert outputs[output["name"]]["shape"][1:] == output["shape"][1:]
    name = next(name for name in outputs if name.endswith(("scores", "values")))
    numbers = np.array(outputs[name]["data"]).reshape(outputs[name]["shape"])
    wanted = [list(served.expected(text).values()) for text in TEXTS]
    np.testing.assert_allclose(numbers, wanted, rtol=1e-4, atol=1e-5)
    if served.task == "multi_label_classification":
        assert outputs["logits.labels"]["data"] == (numbers >= 0.5).ravel().tolist()


def test_client_reads_head(served: Served) -> None:
    with Client(served.address) as client:
        result = client.infer(TEXTS[0])
    numbers = result.scores
    if result.heads is not None:
        assert result.label is None
        (head,) = result.heads.values()
        numbers = head.values if served.task == "regression" else head.scores
    assert numbers == pytest.approx(served.expected(TEXTS[0]), rel=1e-4, abs=1e-5)


def test_parity_is_of_served_numbers(served: Served) -> None:
    check = http.post(f"{served.address}/parity", json={"text": TEXTS[2]}, timeout=120).json()
    assert check["within"]
    assert 0 <= check["score_error"] <= check["bound"]
    golden = http.get(f"{served.address}/parity").json()["golden"]
    ours = [case for case in golden if case["subject"] == "model"]
    assert all(case["score_error"] <= case["bound"] for case in ours)


def test_info_describes_head(served: Served) -> None:
    info = http.get(f"{served.address}/info").json()
    head = info["heads"]["logits"]
    assert (head["task"], info["labels"]) == (served.task, served.names)
    if served.task == "regression":
        assert head["values"][0] == {
            "name": "age", "unit": "years", "minimum": None, "maximum": None, "scale": 12.5,
            "offset": 40.0,
        }  # fmt: skip


def test_evidence_names_its_number(served: Served) -> None:
    answer = http.post(f"{served.address}/infer?evidence=3", json={"text": TEXTS[2]}).json()
    evidence = answer["evidence"]
    if served.task == "binary_classification":
        assert evidence.get("name", answer["label"]) == served.names[1]
    else:
        assert evidence["name"] in served.names
