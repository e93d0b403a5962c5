"""A model whose heads answer for documents and for tokens, and its PyTorch answers."""

import json
from pathlib import Path
from typing import Any

import torch
from several_heads import Encoder, output_layers
from tokenizers import Tokenizer
from torch import Tensor

from aftexport.pipeline.export import export

TOPICS = ("invoice", "contract", "letter")
TAGS = ("O", "B-name", "I-name", "B-date", "I-date")
WIDTHS = {"topic": len(TOPICS), "tags": len(TAGS), "vectors": 4, "embedding": 6}


class FourHeads(Encoder):
    """A topic and an embedding of the document; a tag and a vector of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = output_layers(WIDTHS)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        tokens = self.encode(input_ids, lengths)
        pooled = self.pool(tokens, lengths)
        return {
            "topic": self.heads["topic"](pooled),
            "tags": self.heads["tags"](tokens),
            "vectors": self.heads["vectors"](tokens),
            "embedding": self.heads["embedding"](pooled),
        }


def heads_of(aggregation: str) -> dict[str, Any]:
    """Return the content of the file of heads, with a rule for the spans."""
    return {
        "topic": {"task": "single_label_classification", "labels": TOPICS},
        "tags": {"task": "token_classification", "labels": TAGS, "aggregation": aggregation},
        "vectors": {"task": "feature_extraction", "dimensions": 4, "per_token": True},
        "embedding": {"task": "feature_extraction", "dimensions": 6, "normalize": True},
    }


def exported(
    folder: Path, *, aggregation: str = "simple", tokenizer: Tokenizer | None = None
) -> Path:
    """Export the model to a bundle, and return its path; the source is ``model.pt`` beside it.

    Args:
        folder: an empty folder.
        aggregation: the rule for the spans.
        tokenizer: the tokenizer; None for that of bytes.
    """
    torch.save(FourHeads().state_dict(), folder / "model.pt")
    heads = folder / "heads.json"
    heads.write_text(json.dumps(heads_of(aggregation)))
    words: str = "bytes"
    if tokenizer is not None:
        words = str(folder / "tokenizer.json")
        tokenizer.save(words)
    bundle = export(
        folder / "model.pt", factory="served_heads:FourHeads", heads=heads, tokenizer=words
    )
    return bundle.path


def outputs(ids: list[int]) -> dict[str, Tensor]:
    """Compute the outputs for one document by PyTorch in float64."""
    with torch.inference_mode():
        found = FourHeads().double().eval()(torch.tensor([ids]), torch.tensor([len(ids)]))
    return {name: output[0] for name, output in found.items()}
