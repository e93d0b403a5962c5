"""A model with a head of every kind, for documents and for tokens, and its PyTorch answers."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from several_heads import Encoder, output_layers
from tokenizers import Tokenizer
from torch import Tensor

from aftexport.heads import Head, TokenClassification, TokenHead
from aftexport.pipeline.export import export
from aftserve.model.documents import DocumentAnswer, TokenAnswers
from aftserve.schemas import DocumentResult, Timings

TEXTS = ["An invoice from Zoë 😀.", "a", "Pay by 3 May, or the contract ends. " * 9]
TOPICS = ("invoice", "contract", "letter")
FLAGS = ("urgent", "legal")
ANSWERS = ("no", "yes")
TAGS = ("O", "B-name", "I-name", "B-date", "I-date")
HEADS: dict[str, Any] = {
    "topic": {"task": "single_label_classification", "labels": TOPICS},
    "paid": {"task": "binary_classification", "labels": ANSWERS},
    "flags": {"task": "multi_label_classification", "labels": FLAGS, "thresholds": [0.5, 0.9]},
    "age": {
        "task": "regression",
        "values": [{"name": "years", "unit": "years", "scale": 12.5, "offset": 40.0}],
    },
    "tags": {"task": "token_classification", "labels": TAGS, "aggregation": "simple"},
    "vectors": {"task": "feature_extraction", "dimensions": 4, "per_token": True},
    "embedding": {"task": "feature_extraction", "dimensions": 6, "normalize": True},
}
WIDTHS = {"topic": 3, "paid": 1, "flags": 2, "age": 1, "tags": 5, "vectors": 4, "embedding": 6}
FOR_TOKENS = ("tags", "vectors")


class EveryHead(Encoder):
    """Returns an output for each head of ``HEADS``."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = output_layers(WIDTHS)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        tokens = self.encode(input_ids, lengths)
        pooled = self.pool(tokens, lengths)
        return {n: head(tokens if n in FOR_TOKENS else pooled) for n, head in self.heads.items()}


def exported(
    folder: Path, *, aggregation: str = "simple", tokenizer: Tokenizer | None = None
) -> Path:
    """Export the model to ``heads.bundle``, and return its path; the source is ``model.pt``.

    Without a tokenizer it is that of bytes.
    """
    torch.save(EveryHead().state_dict(), folder / "model.pt")
    heads = folder / "heads.json"
    heads.write_text(json.dumps(HEADS | {"tags": HEADS["tags"] | {"aggregation": aggregation}}))
    words: str = "bytes"
    if tokenizer is not None:
        words = str(folder / "tokenizer.json")
        tokenizer.save(words)
    return export(
        folder / "model.pt", factory="served_heads:EveryHead", heads=heads, tokenizer=words,
        out=folder / "heads.bundle",
    ).path  # fmt: skip


def outputs(ids: list[int]) -> dict[str, Tensor]:
    """Compute the outputs for one document by PyTorch in float64."""
    with torch.inference_mode():
        found = EveryHead().double().eval()(torch.tensor([ids]), torch.tensor([len(ids)]))
    return {name: output[0] for name, output in found.items()}


def infer(client: httpx.Client, *texts: str) -> list[dict[str, Any]]:
    """Return the heads of each document, as /infer answers."""
    answer = client.post("/infer", json={"texts": texts})
    assert answer.status_code == 200, answer.text
    return [result["heads"] for result in answer.json()["results"]]


TAGGER = TokenClassification(labels=("O", "B-name", "I-name"))


def answer_of(head: TokenHead, tokens: int, first: int = 0) -> DocumentAnswer:
    """Return the answer of a head for random logits of ``tokens`` tokens after ``first`` others."""
    decoder = head.decoder()
    decoder.add(np.random.default_rng(3).normal(0, 4, (tokens, head.width)))
    heads: dict[str, Head] = {"head": head}
    result = DocumentResult(
        bundle="digest",
        heads={},
        tokens_total=tokens + first,
        tokens_used=tokens,
        truncated=first > 0,
        policy="tail",
        timings=Timings(
            tokenize_seconds=0, queue_seconds=0, inference_seconds=0, predicted_seconds=0
        ),
    )
    tokens_of = TokenAnswers(heads, {"head": decoder.finish()}, first, None, None)
    return DocumentAnswer(result, tokens_of)
