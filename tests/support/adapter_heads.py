"""A model with a head of every kind, for the formats of other servers."""

import json
from pathlib import Path
from typing import Any

import httpx
from several_heads import Encoder, output_layers
from torch import Tensor

from aftexport.pipeline.export import export

TEXTS = ["An invoice from Zoë 😀.", "a", "Pay by 3 May, or the contract ends. " * 9]
TOPICS = ("invoice", "contract", "letter")
FLAGS = ("urgent", "legal")
ANSWERS = ("no", "yes")
WIDTHS = {"topic": 3, "paid": 1, "flags": 2, "age": 1, "tags": 2, "embedding": 6}
HEADS: dict[str, Any] = {
    "topic": {"task": "single_label_classification", "labels": TOPICS},
    "paid": {"task": "binary_classification", "labels": ANSWERS},
    "flags": {"task": "multi_label_classification", "labels": FLAGS, "thresholds": [0.5, 0.9]},
    "age": {"task": "regression", "values": [{"name": "years"}]},
    "tags": {"task": "token_classification", "labels": ["O", "B-name"]},
    "embedding": {"task": "feature_extraction", "dimensions": 6},
}


class EveryHead(Encoder):
    """Returns an output for each head of ``HEADS``."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = output_layers(WIDTHS)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        tokens = self.encode(input_ids, lengths)
        pooled = self.pool(tokens, lengths)
        return {n: head(tokens if n == "tags" else pooled) for n, head in self.heads.items()}


def exported(folder: Path) -> Path:
    """Export the model to a bundle with a tokenizer, and return its path."""
    (folder / "heads.json").write_text(json.dumps(HEADS))
    out = folder / "heads.bundle"
    return export(
        factory="adapter_heads:EveryHead", heads=folder / "heads.json", tokenizer="bytes", out=out
    ).path


def infer(client: httpx.Client, *texts: str) -> list[dict[str, Any]]:
    """Return the heads of each document, as /infer answers."""
    answer = client.post("/infer", json={"texts": texts})
    assert answer.status_code == 200, answer.text
    return [result["heads"] for result in answer.json()["results"]]
