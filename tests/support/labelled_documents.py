"""Labelled documents for a bundle, whose labels are drawn by its own scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from aftexport.bundle.bundle import Bundle
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.extra_inputs import NO_EXTRAS
from aftexport.heads import MultiLabelClassification
from aftexport.verify.documents import as_inputs

LETTERS = np.frombuffer(b"etaoin shrdlu, ETAOIN. 0123456789", np.uint8)


def labelled(
    folder: Path, count: int, *, temperature: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Return texts of 4 to 256 bytes, with labels by the scores at a temperature."""
    bundle = Bundle.open(folder)
    (head,) = bundle.manifest.heads.values()
    tokenizer = bundle.tokenizer()
    assert tokenizer is not None
    engine = OnnxRuntimeEngine(bundle.model_path)
    generator = np.random.default_rng(seed)
    documents: list[dict[str, Any]] = []
    for _ in range(count):
        # Few letters for each text, so that the scores of texts differ.
        letters = generator.choice(LETTERS, 3)
        size = int(np.exp2(generator.uniform(2, 8)))
        text = bytes(generator.choice(letters, size)).decode()
        inputs = as_inputs([tokenizer.encode(text).ids], bundle.manifest, [NO_EXTRAS])
        logits = engine.run(inputs)["logits"][0].astype(np.float64)
        scores = head.scores(logits / temperature)
        if isinstance(head, MultiLabelClassification):
            holds = generator.random(len(scores)) < scores
            names = [name for name, held in zip(head.names, holds, strict=True) if held]
            documents.append({"text": text, "labels": names})
        else:
            label = head.names[int(generator.choice(len(scores), p=scores))]
            documents.append({"text": text, "label": label})
    return documents


def write_lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(one) + "\n" for one in documents), "utf-8")
    return path
