"""Calibrations with chosen scalings, and labelled documents of known posteriors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aftexport.bundle.bundle import Bundle
from aftexport.calibration.fit import Sample
from aftexport.engines.onnxruntime import OnnxRuntimeEngine
from aftexport.extra_inputs import NO_EXTRAS
from aftexport.heads import (
    BinaryClassification,
    Head,
    MultiLabelClassification,
    SingleLabelClassification,
)
from aftexport.heads.calibration import (
    Band,
    Calibration,
    Estimate,
    FittedScalings,
    Scaling,
    Threshold,
)
from aftexport.verify.documents import as_inputs

BEFORE = Estimate(value=0.21, low=0.18, high=0.25)
AFTER = Estimate(value=0.03, low=0.01, high=0.06)
BANDS = (
    Band(min_tokens=16, max_tokens=99, documents=60, error_before=AFTER, error_after=AFTER),
    Band(min_tokens=130, max_tokens=1024, documents=40, error_before=BEFORE, error_after=AFTER),
)


def calibration(
    *scalings: Scaling, method: str = "temperature", above: float | None = None
) -> Calibration:
    """Return a calibration; ``above`` is the confidence of a threshold, None for no threshold."""
    threshold = None
    if above is not None:
        fit = FittedScalings(scalings=scalings, min_tokens=16, max_tokens=1024, documents=50)
        threshold = Threshold(
            fit=fit,
            budget=0.1, level=0.95, confidence=above, documents=100, answered=50, wrong=1,
            error_bound=0.09, abstained=0.5,
        )  # fmt: skip
    return Calibration.model_validate(
        {
            "method": method, "scalings": scalings, "min_tokens": 16, "max_tokens": 1024,
            "documents": 100, "error_before": BEFORE, "error_after": AFTER, "bands": BANDS,
            "threshold": threshold,
        }
    )  # fmt: skip


def details(name: str = "logits") -> dict[str, object]:
    """Return the content of ``calibration.json`` that belongs to ``BANDS``."""
    bins = [
        {"low": 0.1, "high": 0.2, "count": 20, "mean_score": 0.15, "share": 0.05},
        {"low": 0.9, "high": 1.0, "count": 40, "mean_score": 0.95, "share": 0.75},
    ]
    bands = [
        band.model_dump() | {"reliability_before": bins, "reliability_after": bins}
        for band in BANDS
    ]
    return {"folds": 5, "heads": {name: {"bands": bands}}}


Double = NDArray[np.float64]
ONE_LABEL = SingleLabelClassification(labels=("a", "b", "c"))
TWO_LABELS = BinaryClassification(labels=("no", "yes"), threshold=0.4)
ANY_LABELS = MultiLabelClassification(labels=("a", "b", "c"), thresholds=(0.5, 0.3, 0.6))


def draw(
    generator: np.random.Generator,
    head: Head,
    count: int,
    *,
    log_temperature: float = 0.0,
    slope: float = 0.0,
    bias: float = 0.0,
    spread: float = 2.5,
) -> tuple[Sample, Double]:
    """Return documents of 16 to 65,536 tokens, and the posterior of each name.

    A temperature of ``exp(log_temperature + slope * log2(tokens))`` and a bias give the posterior.
    """
    tokens = np.exp2(generator.uniform(4, 16, count)).astype(np.int64)
    posterior_logits = generator.normal(0, spread, (count, head.width))
    temperature = np.exp(log_temperature + slope * np.log2(tokens))[:, None]
    posterior = head.scores(posterior_logits)
    logits = (posterior_logits - bias) * temperature
    if isinstance(head, MultiLabelClassification):
        truths = (generator.random(posterior.shape) < posterior).astype(np.int64)
    else:
        cumulative = posterior.cumsum(1)[:, :-1]
        truths = (cumulative < generator.random((count, 1))).sum(1)
    return Sample(head, logits, tokens, truths), posterior


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
