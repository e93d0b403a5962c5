"""Two bundles of a model with a head of every kind, and the answers of each without a server."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from served_heads import HEADS, TOPICS, EveryHead

from aftexport.bundle.bundle import Bundle
from aftexport.pipeline.export import export
from aftserve.model.answers import Answer
from aftserve.types import Tokens
from load.documents import bare_engine

LABELS = (TOPICS, TOPICS[::-1])
"""The labels of ``topic`` in each bundle: an answer of one is no answer of the other."""
_LETTERS = np.frombuffer(bytes(range(32, 127)), np.uint8)
_ALPHABET = 4

Expected = dict[str, Any]
"""The fields of a document's answers by head, with ``bundle`` and ``tokens_total``."""


@dataclass(frozen=True)
class Document:
    """A document of the requests."""

    number: int
    text: str  # ASCII characters, one token each
    ids: Tokens


def export_bundles(folder: Path) -> list[Path]:
    """Export a bundle for each of ``LABELS``, with weights of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    bundles = []
    for number, labels in enumerate(LABELS):
        model = EveryHead()  # it has a seed of its own
        generator = torch.Generator().manual_seed(number)
        state = {
            name: value + 0.3 * torch.randn(value.shape, generator=generator)
            for name, value in model.state_dict().items()
        }
        heads = folder / f"heads-{number}.json"
        tags = HEADS["tags"] | {"aggregation": "simple"}
        changes = {"topic": HEADS["topic"] | {"labels": labels}, "tags": tags}
        heads.write_text(json.dumps(HEADS | changes))
        torch.save(state, folder / f"model-{number}.pt")
        exported = export(
            folder / f"model-{number}.pt", factory="served_heads:EveryHead", heads=heads,
            tokenizer="bytes", out=folder / f"exported-{number}", force=True,
            console=Console(quiet=True),
        )  # fmt: skip
        bundles.append(exported.path)
    return bundles


def make_documents(count: int, *, longest: int) -> list[Document]:
    """Draw texts of 1 to ``longest`` characters, each from a few characters of its own."""
    generator = np.random.default_rng(0)
    documents = []
    for number, length in enumerate(np.geomspace(1, longest, count).astype(int)):
        letters = generator.choice(_LETTERS, _ALPHABET, replace=False)
        content = bytes(generator.choice(letters, length))
        ids = np.frombuffer(content, np.uint8).astype(np.int64)
        documents.append(Document(number, content.decode("ascii"), ids))
    return documents


def bare_answers(
    bundle: Path, documents: Sequence[Document], threads: int
) -> tuple[str, list[Expected]]:
    """Return the digest of a bundle, and its answer for each document in a run of its own."""
    engine, digest = bare_engine(bundle, threads), Bundle.open(bundle).digest
    return digest, [
        _expected(engine.classify([one.ids])[0], one)
        | {"bundle": digest, "tokens_total": len(one.ids)}
        for one in documents
    ]


def _expected(answer: Answer, document: Document) -> Expected:
    """Return the fields of the answers by head, as JSON and in columns."""
    expected: Expected = {name: one.model_dump() for name, one in answer.heads.items()}
    columns: Mapping[str, tuple[str, ...]] = {"topic": ("scores",), "paid": ("scores",),
        "flags": ("scores",), "age": ("values",), "embedding": ("vector",)}  # fmt: skip
    for name, (field,) in columns.items():
        values = expected[name][field]
        expected[name]["columns"] = list(values.values() if isinstance(values, dict) else values)
    flags = expected["flags"]
    flags["holds"] = [label in flags["labels"] for label in flags["scores"]]
    tags = answer.tokens["tags"].answer().model_dump()
    names = HEADS["tags"]["labels"]
    tags["columns"] = tags["scores"]
    tags["holds"] = [names.index(label) for label in tags["labels"]]
    for span in tags["spans"]:  # one token is one character
        start, end = span["start_token"], span["end_token"]
        span |= {"start": start, "end": end, "text": document.text[start:end]}
    expected["tags"] = tags
    normalized: Expected = json.loads(json.dumps(expected))  # tuples to lists
    return normalized
