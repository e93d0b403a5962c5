"""Calibrated scores and abstention of a server, from 200 labelled documents."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny_models
import torch
from calibrations import labelled, write_lines
from clients import http
from servers import serving

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.cli import main
from aftexport.heads import MultiLabelClassification
from aftexport.heads.calibration import Calibration
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.pipeline.export import export

TEXTS = ["An invoice.", "a", "Pay this by Friday, or the contract ends. " * 9, "tttt sss  ee"]
FLAGS = ("urgent", "legal", "spam")
OLD_FIELDS = {
    "bundle", "label", "scores", "tokens_total", "tokens_used", "truncated", "policy", "timings"
}  # fmt: skip


class Calibrated:
    """A calibrated bundle and the address of its server."""

    def __init__(self, bundle: Bundle, address: str) -> None:
        self.address = address
        self.bundle = bundle
        (self.head,) = bundle.manifest.heads.values()
        assert bundle.manifest.calibration is not None
        self.calibration: Calibration = bundle.manifest.calibration["logits"]

    def expected(self, answer: dict[str, Any]) -> dict[str, float]:
        """Compute calibrated scores from the raw ones and the numbers in the manifest."""
        names, raw = list(answer["scores"]), np.array(list(answer["scores"].values()))
        low, high = self.calibration.min_tokens, self.calibration.max_tokens
        doublings = np.log2(np.clip(answer["tokens_used"], low, high))
        logs = [s.log_temperature + s.slope * doublings for s in self.calibration.scalings]
        if isinstance(self.head, MultiLabelClassification):
            bias = np.array([s.bias for s in self.calibration.scalings])
            logits = np.log(raw / (1 - raw)) / np.exp(logs) + bias
            scores = 1 / (1 + np.exp(-logits))
        else:
            powers = raw ** (1 / np.exp(logs[0]))
            scores = powers / powers.sum()
        return dict(zip(names, scores.tolist(), strict=True))

    def abstains(self, answer: dict[str, Any]) -> bool:
        assert self.calibration.threshold is not None
        scores = answer["calibrated"]
        if isinstance(self.head, MultiLabelClassification):
            own = [p if name in answer["labels"] else 1 - p for name, p in scores.items()]
        else:
            own = [scores[answer["label"]]]
        return min(own) < self.calibration.threshold.confidence


@pytest.fixture(
    scope="module", params=["single_label_classification", "multi_label_classification"]
)
def calibrated(
    request: pytest.FixtureRequest, bundle_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Calibrated]:
    folder = tmp_path_factory.mktemp(request.param)
    source = bundle_folder
    if request.param == "multi_label_classification":
        torch.manual_seed(11)
        settings = tiny_models.CONFIG | {"problem_type": request.param}
        model = DocumentClassifier(ClassifierConfig(**settings)).eval()
        with torch.no_grad():
            model.head.weight.mul_(9)
        tokenizer = tiny_models.byte_tokenizer().to_str()
        aftexport.save(folder / "model.pt", model=model, labels=FLAGS, tokenizer=tokenizer)
        source = export(folder / "model.pt").path
    temperature = 0.7 if request.param == "multi_label_classification" else 0.2
    data = write_lines(folder / "labelled.jsonl", labelled(source, 200, temperature=temperature))
    out = folder / "calibrated.bundle"
    words = ["calibrate", str(source), "--data", str(data), "--out", str(out)]
    assert main([*words, "--error-budget", "0.3"]) == 0
    with serving(out, folder / "log") as (address, _):
        yield Calibrated(Bundle.open(out), address)


def answers(calibrated: Calibrated) -> list[dict[str, Any]]:
    """Return the answer of each text, with the fields of the head beside the others."""
    response = http.post(f"{calibrated.address}/infer", json={"texts": TEXTS})
    results = response.json()["results"]
    return [one | one["heads"]["logits"] if "heads" in one else one for one in results]


def test_answers_have_calibrated_scores(calibrated: Calibrated) -> None:
    found = answers(calibrated)
    for answer in found:
        assert answer["calibrated"] == pytest.approx(calibrated.expected(answer), abs=2e-6)
        assert answer["abstain"] is calibrated.abstains(answer)
    assert any(answer["calibrated"] != answer["scores"] for answer in found)


def test_info_describes_calibration(calibrated: Calibrated) -> None:
    info = http.get(f"{calibrated.address}/info").json()
    given = info["head_calibrations"]["logits"]
    assert Calibration.model_validate_json(json.dumps(given)) == calibrated.calibration
    assert (given["documents"], given["threshold"]["budget"]) == (97, 0.3)
    assert given["bands"][0]["documents"] == 200


def test_plain_answers_have_no_new_field(client: httpx.Client) -> None:
    answer = client.post("/infer", json={"text": TEXTS[0]}).json()
    assert answer.keys() == OLD_FIELDS
    outputs = client.get("/v2/models/model").json()["outputs"]
    assert [one["name"] for one in outputs] == ["label", "scores", "tokens_total", "tokens_used"]
    assert client.get("/info").json()["head_calibrations"] is None


def test_evidence_names_independent_label(calibrated: Calibrated) -> None:
    """Without a label of the answer, the evidence names the label that it is for."""
    response = http.post(f"{calibrated.address}/infer?evidence=3", json={"text": TEXTS[2]})
    name = response.json()["evidence"].get("name")
    assert name in (FLAGS if isinstance(calibrated.head, MultiLabelClassification) else (None,))
