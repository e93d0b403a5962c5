"""The served model, the documents of the requests, and their expected scores."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import tiny_models
import torch
from rich.console import Console

import aftexport
from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.nn import ClassifierConfig, DocumentClassifier
from aftexport.parity import TOLERANCES
from aftexport.pipeline.export import export
from aftserve.model.classifier import Classifier
from aftserve.types import Tokens

BOUND = TOLERANCES["fp32"].bound
_LETTERS = np.frombuffer(bytes(range(32, 127)), np.uint8)
_ALPHABET = 4


@dataclass(frozen=True)
class Document:
    """A document of the requests."""

    text: str  # ASCII characters, one token each
    ids: Tokens
    scores: dict[str, float]  # by label, from a run of the document alone

    @property
    def as_text(self) -> bytes:
        """The request body with the text."""
        return json.dumps({"text": self.text}).encode()

    @property
    def as_ids(self) -> bytes:
        """The request body with the token IDs."""
        return json.dumps({"input_ids": [self.ids.tolist()]}).encode()

    def is_answered_by(self, scores: dict[str, float]) -> bool:
        """Return whether scores equal those of the document, within the bound of parity."""
        return scores.keys() == self.scores.keys() and all(
            abs(scores[label] - expected) <= BOUND for label, expected in self.scores.items()
        )


def export_model(folder: Path, *, mechanism: str, dim: int, depth: int) -> tuple[Path, Path]:
    """Export a model with random weights and return its checkpoint and its bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, bundle = folder / "model.pt", folder / "model.bundle"
    torch.manual_seed(0)
    sizes = {"mechanism": mechanism, "dim": dim, "depth": depth, "ffn_dim": 4 * dim}
    model = DocumentClassifier(ClassifierConfig(**tiny_models.CONFIG | sizes | {"num_heads": 4}))
    tokenizer = tiny_models.byte_tokenizer().to_str()
    aftexport.save(checkpoint, model=model, labels=tiny_models.LABELS, tokenizer=tokenizer)
    export(checkpoint, to="onnx", out=bundle, force=True, console=Console(quiet=True))
    return checkpoint, bundle


def bare_engine(bundle: Path, threads: int) -> Classifier:
    """Load the model of a bundle without a server."""
    opened = Bundle.open(bundle)
    return Classifier(opened, OnnxRuntimeEngine(opened.model_path, threads=threads))


def make_documents(
    engine: Classifier, count: int, *, shortest: int, longest: int
) -> list[Document]:
    """Draw documents with lengths in a geometric sequence from ``shortest`` to ``longest``.

    Each document draws its text from a few characters of its own, so that all scores differ.
    Otherwise a swapped answer could pass for the right one.
    """
    generator = np.random.default_rng(0)
    documents = []
    for length in np.geomspace(shortest, longest, count).astype(int):
        letters = generator.choice(_LETTERS, _ALPHABET, replace=False)
        text = bytes(generator.choice(letters, length)).decode("ascii")
        ids = engine.tokenize(text)
        documents.append(Document(text, ids, engine.classify([ids])[0].heads["logits"].scores))
    generator.shuffle(documents)  # type: ignore[arg-type]
    return documents


def count_ambiguous_pairs(documents: Sequence[Document]) -> int:
    """Count the pairs of documents whose scores are equal within the bound."""
    return sum(a.is_answered_by(b.scores) for a, b in combinations(documents, 2))
